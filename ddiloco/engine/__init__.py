"""Performs the machines' commands against the ports."""
