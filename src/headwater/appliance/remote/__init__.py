"""Use of the queue of another machine over SSH: `headwater --appliance ssh://host`.

The client starts the system's `ssh` (`connection`, `ssh`), which runs `headwater jobs stdio` on the other
machine (`server`). Both exchange frames (`frames`) over its stdin and stdout. If the connection breaks, the
client may send a request a second time.
"""
