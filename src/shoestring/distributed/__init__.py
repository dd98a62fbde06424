"""Starting workers, joining them to a world, and finding out which of them are gone."""
