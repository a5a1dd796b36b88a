"""BERT beside Llama: the encoder, its tokenizer and its heads, in the same style and with the same names of parts."""
