"""The pages that people open, one module for each kind; all HTML is made by templates, which escape."""
