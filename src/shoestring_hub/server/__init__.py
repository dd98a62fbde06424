"""The server of the hub, a Django project. `configure.configure` must be called before anything else is imported."""
