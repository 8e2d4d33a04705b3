"""A world in virtual time: one heap of events, a hostile exchange, faults."""
