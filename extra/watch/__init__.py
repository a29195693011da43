"""Watch a training step: it is recorded on real ranks, and played in a page that needs only a browser."""
