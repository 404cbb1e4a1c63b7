"""Images, and the nodes of a job in containers of this machine."""
