"""What a student begins a task with. These files are copied, and not imported."""
