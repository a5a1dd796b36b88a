"""The pages about single components, `docs/components/` and `bert/components/`: their worked examples."""
