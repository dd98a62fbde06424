"""The hub: a server for a lab's runs, and its client.

`client` needs no Django, because it is imported where runs are trained; `server` is a Django project (extra `hub`).
`shoestring` imports neither: its tables of commands and of trackers only hold the names of these packages.
"""
