"""Models in other programs' formats, in and out: `python -m convert MODEL OUT --to hf|llama2c|gguf|onnx`."""
