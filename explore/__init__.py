"""Pages to look at: what a model computes of a text, how a run went. Imported where somebody asks for it."""
