"""A hub in a process of its own, people who use it as browsers and programs do, and run folders to push."""
