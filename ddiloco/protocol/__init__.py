"""The protocol as pure state machines: no clock, arrays, randomness or I/O.

Read in this order: schedule, messages, quorum, syncer, learner, ledger.
"""
