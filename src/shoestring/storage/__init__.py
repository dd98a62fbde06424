"""Atomic writes, and safe reading of files and folders that other users may have created; used by all areas."""
