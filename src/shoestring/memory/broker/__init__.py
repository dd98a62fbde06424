"""Host memory leased to the processes of a host, which agree through record files: each process locks its own."""
