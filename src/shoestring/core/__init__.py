"""Classes that every area uses: World, Job, Trace, Feature. Import them from the modules of this package."""
