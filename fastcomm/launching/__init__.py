"""How ranks start, find each other, and end: launchers, rendezvous, fastcomm run."""
