"""Files that are whole or not there, and places where other users may have put something: for all areas."""
