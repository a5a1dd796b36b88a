# %% [markdown]
# # Part 2. A Llama, piece by piece
#
# One head can look back, and that is all it can do. A Llama has more of everything, and a few pieces that make it
# possible to train many layers on top of each other:
#
# | one head | Llama |
# |---|---|
# | a vector for each position, at most 32 | a rotation of queries and keys: RoPE |
# | one head | several heads, which share keys and values |
# | nothing is computed from what a position has found | a feed-forward after each attention: SwiGLU |
# | one layer | many, each added to a *residual stream* |
# | vectors of any size | RMSNorm before each part |
#
# What you write here goes into the package's own classes: `check` puts your function in the place of the one in
# `llama.py` if it is right. At the end you train a model that is made of your code.
#
# ## 2.1 RMSNorm
#
# $$\text{RMSNorm}(x) = \frac{x}{\sqrt{\text{mean}(x^2) + \epsilon}} \odot w$$
#
# **Why?** Each layer adds something to the vector of a position, so vectors grow from layer to layer. A part that
# reads them needs inputs of a known size. RMSNorm divides each vector by its own root mean square: the direction
# stays, the size is 1. $\epsilon$ keeps a vector of zeros from being divided by 0. Each position by itself, `b s D` to
# `b s D`. Read more: [rmsnorm](docs/components/rmsnorm.md).


# %% exercise
def _norm(self, x):
    """x: ... D -> ... D. The weight w is multiplied in `forward`, not here. The small number is self.eps."""
    # >>> divide x by the root of the mean of its squares over the last dimension (keepdim=True); eps under the root
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt()
    # <<<


check("RMSNorm", llama.RMSNorm, _norm)
vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(6)) * torch.tensor([[0.1], [1.0], [50.0]])
for name, some in (("before:", vectors), ("after: ", llama.RMSNorm(8)(vectors))):
    print("sizes", name, [f"{size:.2f}" for size in some.pow(2).mean(-1).sqrt().tolist()])

# %% [markdown]
# ## 2.2 RoPE: where a token stands
#
# Attention does not see order: exchange two keys and their values, and the result is the same. In part 1 a learned
# vector for each position told the head where it is, but only for 32 positions, and "three back" had to be learned anew
# for each of them.
#
# RoPE (*rotary position embedding*) **turns** each query and each key by an angle that grows with its position. The
# product of two turned vectors depends on the *difference* of their angles, so a score depends on the distance alone.
# A head's `d` numbers are $d/2$ pairs of neighbours; pair $i$ at position $m$ turns by $m \, \theta_i$:
#
# $$\theta_i = 10000^{-2i/d}, \qquad
# \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix} \to
# \begin{pmatrix} x_{2i} \cos m\theta_i - x_{2i+1} \sin m\theta_i \\
# x_{2i} \sin m\theta_i + x_{2i+1} \cos m\theta_i \end{pmatrix}$$
#
# **Why many angles?** Fast pairs tell near positions apart, slow pairs far ones, like the hands of a clock. Values are
# not turned: where a token stands should change who listens to it, and not what it says. Read more:
# [rope](docs/components/rope.md).


# %% exercise
def apply_rotary_emb(query, key, head_dim, max_seq_len, theta=10000.0, scaling=None):
    """query: b s h d, key: b s g d -> both, turned. No model of this notebook has a scaling."""
    # >>> frequencies d/2: theta to the power of -2i/d for i = 0, 1, ...; torch.arange(0, head_dim, 2) is 2i
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    # <<<
    angles = torch.arange(query.shape[1])[:, None, None] * frequencies  # s 1 d/2: one angle for all heads
    cos, sin = angles.cos(), angles.sin()

    def turned(x):
        # >>> take both numbers of all pairs (x[..., 0::2] and x[..., 1::2]), turn them, and put neighbours side by side
        first, second = x[..., 0::2], x[..., 1::2]  # b s h d/2
        both = (first * cos - second * sin, first * sin + second * cos)
        return torch.stack(both, dim=-1).flatten(-2)
        # <<<

    return turned(query), turned(key)


check("rotary embedding", rope, apply_rotary_emb)
d = 32
ones = torch.tensor([1.0, 0.0]).repeat(d // 2).expand(1, 33, 1, d)  # the same vector at 33 positions
turned = rope.apply_rotary_emb(ones, ones, d, 33)[0][0, :, 0]  # s d
for pair in (0, 2, 4, 8):
    plt.plot(turned[:, 2 * pair], label=f"pair {pair}")
plt.plot(turned @ turned[0] / (d / 2), "k--", label="all pairs, mean")
plt.xlabel("distance between query and key")
plt.ylabel("score")
plt.ylim(-1.6, 1.1)  # room for the legend
plt.legend(loc="lower left", ncols=5, fontsize=7)
plt.show()
print(f"positions 5 and 2: score {turned[5] @ turned[2]:.4f}; positions 25 and 22: {turned[25] @ turned[22]:.4f}")

# %% [markdown]
# ## 2.3 Scores of many heads
#
# Why several heads? One softmax gives one mean. A position may need the word before it *and* the subject of the
# sentence; two heads of half the size can look at both, for the same price. All heads are computed at once: `h` is one
# more dimension before `s d`, and your `attend` would already do it.
#
# New is the argument `mask`. It is `True` where a query may see a key, and a causal model gives it. Without it every
# token sees every other, and **the assignment's reference has no mask at all** (`attention="bidirectional"`): its
# numbers were computed like that, although the model was *trained* with a causal mask. Both must be right here.


# %% exercise
def compute_query_key_value_scores(self, query, key, value, mask=None):
    """query: b h s d, key and value: b h t d -> b h s d"""
    # >>> scaled scores b h s t
    scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)
    # <<<
    if mask is not None:
        # >>> scores is -inf where the mask is False (~mask)
        scores = scores.masked_fill(~mask, -math.inf)
        # <<<
    # >>> weights over the keys, then the mean of the values; return it
    return scores.softmax(dim=-1) @ value
    # <<<


check("scores and softmax", llama.Attention, compute_query_key_value_scores)

# %% [markdown]
# ## 2.4 The whole attention, with grouped queries
#
# A text that is being written needs the keys and values of all tokens so far at each new token. To keep that small,
# several query heads share one head of keys and values: with `h` = 4 and `g` = 2, query heads 0 and 1 use the first,
# 2 and 3 the second. Before the scores each key/value head is repeated, in the order `0 0 1 1`.
# `repeat_interleave` has that order; `repeat` gives `0 1 0 1`, and no error tells. Read more:
# [grouped queries](docs/components/grouped-queries.md).
#
# After the scores the heads are put side by side again, `b h s d` to `b s D`: length and heads must change places
# *first*, else numbers of different positions are mixed. A last matrix, `compute_output`, mixes the heads. (Here
# and in 2.5 and 2.7 `llama.py` has dropout as well; it is 0 in all models of this notebook.)


# %% exercise
def forward(self, x):
    """x: b s D -> b s D"""
    heads = (-1, self.head_dim)
    query = self.compute_query(x).unflatten(-1, heads)  # b s h d
    key = self.compute_key(x).unflatten(-1, heads)  # b s g d
    value = self.compute_value(x).unflatten(-1, heads)
    query, key = rope.apply_rotary_emb(query, key, self.head_dim, self.max_seq_len, *self.rope)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))  # b h s d, b g s d
    # >>> repeat the heads of key and value self.n_rep times, in the order 0 0 1 1: b g s d -> b h s d
    key = key.repeat_interleave(self.n_rep, dim=1)
    value = value.repeat_interleave(self.n_rep, dim=1)
    # <<<
    mask = llama.causal_mask(x.shape[1]) if self.is_causal else None  # s t
    output = self.compute_query_key_value_scores(query, key, value, mask)  # b h s d
    # >>> heads side by side: b h s d -> b s h d -> b s D; then self.compute_output; return it
    output = output.transpose(1, 2).flatten(-2)
    return self.compute_output(output)
    # <<<


check("grouped queries", llama.Attention, forward)

# %% [markdown]
# ## 2.5 SwiGLU: thinking about what was found
#
# Attention only takes means: it moves information between positions. The feed-forward computes something new from it,
# at each position by itself:
#
# $$\text{FFN}(x) = W_2 (\text{SiLU}(W_1 x) \odot W_3 x), \qquad \text{SiLU}(a) = a \, \sigma(a)$$
#
# `b s D` to `b s f` and back. **Why two matrices at the entrance?** One product is a *gate* for the other: where
# $\text{SiLU}(W_1 x)$ is near 0, nothing of $W_3 x$ goes through. So a part can say "if this, then that". Without an
# activation three matrices could do no more than one product. Read more: [swiglu](docs/components/swiglu.md).


# %% exercise
def forward(self, x):
    """x: b s D -> b s D. The matrices are self.w1, self.w2 and self.w3; F.silu is SiLU."""
    # >>> one line: the formula
    return self.w2(F.silu(self.w1(x)) * self.w3(x))
    # <<<


check("feed-forward", llama.FeedForward, forward)

# %% [markdown]
# ## 2.6 One layer
#
# $$h = x + \text{Attention}(\text{RMSNorm}(x)), \qquad \text{out} = h + \text{FFN}(\text{RMSNorm}(h))$$
#
# **Why is the input added?** Then a layer has only to learn what to *change*, and the gradient has a straight way back
# from the loss to the first layer: through a sum it passes unchanged. **Why is the norm inside?** So that this straight
# way has no norm on it ("pre-norm"). Read more: [layer](docs/components/layer.md).


# %% exercise
def forward(self, x):
    """x: b s D -> b s D. Parts: self.attention, self.feed_forward, self.attention_norm, self.ffn_norm."""
    # >>> two lines: x plus the attention of what is normalised, then the same with the feed-forward; return it
    h = x + self.attention(self.attention_norm(x))
    return h + self.feed_forward(self.ffn_norm(h))
    # <<<


check("layer", llama.LlamaLayer, forward)


# %% [markdown]
# **Break it.** How large is the gradient that reaches the first layer of a new model? With the sum, the number of
# layers hardly matters. Without it the vectors get smaller in each layer, soon too small for the norm to mend, and with
# a few layers nothing comes back: the first layer would never learn.


# %%
def forward(self, x):
    return self.feed_forward(self.ffn_norm(self.attention(self.attention_norm(x))))


def new_llama(n_layers):
    torch.manual_seed(4)
    shape = {"vocab_size": v, "dim": 48, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "max_seq_len": 64}
    return llama.Llama(llama.LlamaConfig(**shape, n_layers=n_layers, attention="causal"))


def first_gradient(n_layers):
    model, pieces = new_llama(n_layers), batch(ids, generator=torch.Generator().manual_seed(6))
    logits, _ = model(pieces[:, :-1], targets=pieces)
    F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten()).backward()
    return model.layers[0].attention.compute_value.weight.grad.norm().item()


counts_of_layers = range(1, 6)
gradients = {"with the sum": [*map(first_gradient, counts_of_layers)]}
with replaced(llama.LlamaLayer, forward):
    gradients["without"] = [*map(first_gradient, counts_of_layers)]
for name, sizes in gradients.items():
    print(f"{name + ':':14} 1 layer {sizes[0]:.1e}, 3 layers {sizes[2]:.1e}, 5 layers {sizes[-1]:.1e}")
    plt.semilogy(counts_of_layers, sizes, "o-", label=name)
plt.xticks(counts_of_layers)
plt.xlabel("number of layers")
plt.ylabel("gradient of the first layer")
plt.legend()
plt.show()

# %% [markdown]
# ## 2.7 The whole model
#
# Ids become vectors (`tok_embeddings`), the layers add to them, the last norm brings them to a known size, and
# `output` turns each into a logit for every token. Embedding and output are one matrix (they are *tied*): a token's
# vector is also what the model must point to in order to predict it.
#
# To train, the logits of all positions are needed (`targets` is given); to write or to classify, only the last one's.
# Read more: [forward](docs/components/forward.md).


# %% exercise
def forward(self, tokens, targets=None):
    """tokens: b s -> logits b s v if targets are given, else b 1 v; and the hidden states b s D."""
    # >>> the states h: self.tok_embeddings of the tokens, then one of self.layers after the other, then self.norm
    h = self.tok_embeddings(tokens)
    for layer in self.layers:
        h = layer(h)
    h = self.norm(h)
    # <<<
    # >>> self.output of all positions, or of the last one (h[:, [-1]] keeps the dimension); return logits and h
    logits = self.output(h if targets is not None else h[:, [-1]])
    return logits, h
    # <<<


check("embedding and head", llama.Llama, forward)


# %% [markdown]
# ## 2.8 From scratch: every stage, one curve
#
# The bigram and the head of part 1, one layer, and four layers, all made of your code, all on the same pieces of text,
# for the same number of steps. (The optimizer, AdamW, you write in part 3.)


# %% chance
def train_llama(n_layers):
    model = new_llama(n_layers)

    def logits_of(ids):
        return model(ids, targets=ids)[0]

    return logits_of, [*model.parameters()], learn(logits_of, model.parameters())


stages = {
    "bigram": (lambda ids: bigram[ids], [bigram], bigram_losses),
    "one head": (heads["right"], [*heads["right"].parameters()], head_losses["right"]),
}
for name, n_layers in (("one layer", 1), ("four layers", 4)):
    stages[name] = train_llama(n_layers)
for name, (logits_of, parameters, losses) in stages.items():
    plt.plot(torch.tensor(losses).view(-1, 10).mean(1), label=name)
    size = sum(parameter.numel() for parameter in parameters)
    print(f"{name + ':':12} {size:6} parameters, held out {held_out_loss(logits_of):.3f}")
plt.xlabel("ten steps")
plt.ylabel("loss")
plt.legend()
plt.show()

# %% [markdown]
# Each stage sees more than the one before: one character; all characters, once; what was computed from all characters,
# again and again. And what they write:

# %% chance
for name, (logits_of, _, _) in stages.items():
    print(f"{name + ':':12} {write(logits_of)}")
