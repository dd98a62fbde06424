"""Models of the built-in jobs, their file formats and interchange with Hugging Face; import the modules one by one."""
