// The words of a live page in each language. {0}, {1}, ... stand for values. What a language lacks is said in English;
// what English lacks here stands in page.html, beside the name in data-say ("tokens.title", "tokens.lead", ...). The
// drawings that all pages have say English sentences with `told`: other languages have these sentences as names.

const WORDS = {
  en: {
    "language": "English",
    "live.title": "Type, and it thinks",
    "live.lead": "The model runs inside this page. At every key it reads the text again; everything below is about that text.",
    "live.foot": "Made by python -m explore. The model runs with this page; no other network is needed.",
    "live.text": "The text",
    "live.computing": "computing \u2026",
    "live.ready": "{0} tokens, read in {1} ms",
    "live.cut": "The model reads the last {0} of {1} tokens.",
    "live.nothing": "Type something to begin.",
    "live.unknown": "No token of this model: {0}",
    "live.failed": "It cannot compute this: {0}",
    "live.broken": "The numbers are no longer numbers (NaN): nothing can be chosen.",
    "next.title": "What comes next",
    "next.caption": "Click a token to put it there.",
    "next.switched": "With your switches. Click a token to put it there.",
    "next.token": "Token",
    "next.chance": "Chance",
    "next.model": "Model",
    "next.kept": "{0} of {1} tokens can be drawn.",
    "next.put": "put {0}, {1}",
    "sampling.title": "How it is chosen",
    "sampling.temperature": "Temperature",
    "sampling.top_k": "Top-k (0: all)",
    "sampling.top_p": "Top-p",
    "sampling.min_p": "Min-p",
    "sampling.seed": "Seed",
    "made.title": "What it makes of it",
    "made.run": "Run",
    "made.pause": "Pause",
    "made.step": "One token",
    "made.back": "Back",
    "made.clear": "Clear",
    "made.speed": "{0} tokens a second",
    "made.tokens": "The tokens that were made; choose one to go back to it and put another in its place.",
    "made.token": "{0}, number {1}, probability {2}: go back to before it",
    "copy.text": "Copy as text",
    "copy.picture": "Save the map as a picture",
    "copy.done": "copied",
    "copy.failed": "this browser does not let a page copy",
    "break.title": "Break it",
    "break.lead": "Usual mistakes, and parts that you can switch off. The model with your switches stands beside the right one in all the figures below.",
    "break.mistakes": "Usual mistakes",
    "break.parts": "Parts",
    "break.attention": "Attention",
    "break.layer_off": "Layer {0} off",
    "break.head_off": "Layer {0}, head {1} off",
    "break.uniform": "Layer {0}, head {1} looks everywhere alike",
    "break.part_of": "Of the layer and head that are chosen below:",
    "break.none": "All switches off",
    "break.where": "{0}, line {1}",
    "break.same": "makes no difference to this model: it has as many key/value heads as query heads",
    "break.mask": "Without the causal mask: a token sees what follows",
    "break.mask_on": "With a causal mask, which this model has not",
    "break.scores": "Scores not divided by \u221ad",
    "break.halves": "Rotation of half-vectors in place of neighbours",
    "break.position": "Queries one position late",
    "break.heads": "All queries use the first key/value head",
    "break.repeat": "Key/value heads repeated as 1 2 1 2, not as 1 1 2 2",
    "break.residual": "No residual: x and h are not added",
    "break.gelu": "GELU for SiLU",
    "break.norm": "RMSNorm without the square",
    "compare.title": "Side by side",
    "compare.right": "As it is",
    "compare.now": "With your switches",
    "compare.other": "The other attention",
    "compare.goes_on": "Goes on (temperature 0)",
    "compare.perplexity": "Perplexity of your text",
    "compare.text": "A text to measure",
    "compare.measure": "Measure",
    "compare.measuring": "measuring \u2026",
    "compare.tokens": "of {0} tokens",
    "compare.sees": "sees what it predicts",
    "attention.lead": "Each row of a map is a token that looks, each column one that it may look at; a row adds up to 1. The model as it is stands on the left; on the right it has your switches or, while there are none, the other attention.",
    "kind.causal": "causal: a token sees itself and those before it",
    "kind.bidirectional": "bidirectional: every token sees all others",
    "numbers.title": "One head in numbers",
    "numbers.lead": "How the weight of one pair comes about. Point at a cell of a map, or choose the two tokens here.",
    "numbers.query": "Looks",
    "numbers.key": "Is looked at",
    "numbers.column": "Model",
    "numbers.pair": "Pair",
    "numbers.caption": "Queries and keys, pair by pair, before and after the rotation",
    "numbers.q": "Query",
    "numbers.q_turned": "Query, turned",
    "numbers.k": "Key",
    "numbers.k_turned": "Key, turned",
    "numbers.adds": "Adds",
    "numbers.sum": "The sum is {0}; divided by {1} the score is {2}; among all scores of the row that is the weight {3}.",
    "numbers.hidden": "The sum is {0}; divided by {1} the score would be {2}. The mask hides this key: the weight is 0.",
    "numbers.heads": "Query head {0} of {1} reads key/value head {2} of {3}.",
    "words.title": "Word by word",
    "words.lead": "Click a word to leave it out, or write another one in its place, and see what becomes of the decision.",
    "words.decision": "The decision",
    "words.out": "leave out {0}",
    "words.in": "put back {0}",
    "words.all": "Put all words back",
  },
};

let language = "en";

/** The words of a name in the language that is chosen. */
function t(name, ...values) {
  const words = WORDS[language]?.[name] ?? WORDS.en[name] ?? name;
  return words.replace(/\{(\d)\}/g, (_, index) => values[index]);
}

/** Elements say what their attribute data-say names. */
function sayAll(root = document) {
  for (const element of root.querySelectorAll("[data-say]")) {
    const name = element.dataset.say;
    element.dataset.english ??= element.textContent;
    const words = name in WORDS.en || WORDS[language]?.[name] ? t(name) : element.dataset.english;
    if (element.textContent !== words) element.textContent = words; // what stays keeps its markup
  }
  for (const element of root.querySelectorAll("[data-label]")) element.setAttribute("aria-label", t(element.dataset.label));
}

/** The switch of languages, where there is more than one. */
function setUpLanguages(onChange) {
  const names = Object.keys(WORDS);
  byId("language").hidden = names.length < 2;
  segments(byId("language"), names.map((name) => [name, WORDS[name].language]), language, (value) => {
    language = value;
    document.documentElement.lang = value;
    sayAll();
    onChange();
  });
}
