"""How bytes, text and files of each format are made hostile. Whatever is drawn comes from the generator given."""
