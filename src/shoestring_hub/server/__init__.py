"""The server of the hub, a Django project. `configure.configure` sets it up for a folder before anything else."""
