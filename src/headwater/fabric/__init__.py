"""Communication between the ranks of a run: launchers, rendezvous, shared memory and collectives."""
