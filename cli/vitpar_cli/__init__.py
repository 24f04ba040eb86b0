"""The commands: they read options, call the library and print, and hold no rules of their own."""
