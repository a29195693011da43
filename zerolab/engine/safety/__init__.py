"""What cannot work is refused in words, on every rank; before anything is changed, or at the next forward."""
