"""HTML pages: what a model computes from a text, and how a run went. The flags that ask for a page import it."""
