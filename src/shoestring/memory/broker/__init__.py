"""Leases host memory to the processes of a host, which coordinate through files: each process locks its own record."""
