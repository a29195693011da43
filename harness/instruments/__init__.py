"""The instruments: which bytes are alive and what for, which collectives run, and when. All watch from outside."""
