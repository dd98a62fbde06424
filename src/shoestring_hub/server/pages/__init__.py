"""The web pages of the hub, one module for each kind; all HTML comes from templates, which escape their values."""
