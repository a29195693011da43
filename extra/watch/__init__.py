"""A step that one can watch: recorded from real ranks, and played in a page that needs nothing but a browser."""
