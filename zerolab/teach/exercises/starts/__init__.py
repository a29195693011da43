"""The files with which a student begins the tasks. These files are copied, and not imported."""
