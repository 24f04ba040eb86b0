"""Output of searches and predictions: text, JSON, HTML pages with charts, and traces."""
