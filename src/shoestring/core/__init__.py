"""The nouns every area shares: World, Cluster, Job, Trace, Feature. Import the modules, not this package."""
