// Text to token ids and back: SentencePiece's BPE with pieces for bytes, and the byte-level BPE of a tokenizer.json.
//
// A tokenizer: { kind: "sentencepiece", pieces, scores, types, rules, addsSpace, strips }, or { kind: "bytes", pieces,
// merges, added, patterns, nfc, addsSpace, ignoresMerges }. Both: begins (the ids before a text), bos (before
// a text of no tokens, if nothing else is), special (ids that
// decode to nothing).

const SPACE = "\u2581";
const [NORMAL, UNKNOWN, , , , BYTE] = [1, 2, 3, 4, 5, 6]; // SentencePiece's types of pieces
const utf8 = new TextEncoder();

function makeTokenizer(about) {
  return about === null ? new Numbers() : about.kind === "bytes" ? new ByteLevel(about) : new SentencePiece(about);
}

/** Join neighbours, the pair of the lowest rank first, of equal ones the leftmost. rankOf(a, b): undefined for no pair.
 *
 * symbols: texts. A heap has the pairs; one whose sides have changed since is passed over when it comes up.
 */
function merged(symbols, rankOf) {
  const [next, before] = [symbols.map((_, i) => i + 1), symbols.map((_, i) => i - 1)];
  const heap = new Heap((a, b) => a.rank - b.rank || a.left - b.left);
  const offer = (left, right) => {
    if (left < 0 || right >= symbols.length) return;
    const rank = rankOf(symbols[left], symbols[right]);
    if (rank !== undefined) heap.push({ rank, left, right, one: symbols[left], other: symbols[right] });
  };
  symbols = [...symbols];
  for (let i = 0; i + 1 < symbols.length; i++) offer(i, i + 1);
  for (let pair = heap.pop(); pair; pair = heap.pop()) {
    const { left, right, one, other } = pair;
    if (symbols[left] !== one || symbols[right] !== other) continue;
    [symbols[left], symbols[right]] = [one + other, null];
    next[left] = next[right];
    if (next[right] < symbols.length) before[next[right]] = left;
    offer(before[left], left);
    offer(left, next[left]);
  }
  return symbols.filter((symbol) => symbol !== null);
}

class Heap {
  constructor(compare) {
    this.compare = compare;
    this.items = [];
  }

  push(item) {
    let at = this.items.push(item) - 1;
    for (let above = (at - 1) >> 1; at && this.compare(item, this.items[above]) < 0; above = (at - 1) >> 1) {
      this.items[at] = this.items[above];
      at = above;
    }
    this.items[at] = item;
  }

  pop() {
    const [top, last] = [this.items[0], this.items.pop()];
    if (!this.items.length) return top;
    let at = 0;
    for (let below = 1; below < this.items.length; below = 2 * at + 1) {
      if (below + 1 < this.items.length && this.compare(this.items[below + 1], this.items[below]) < 0) below++;
      if (this.compare(last, this.items[below]) <= 0) break;
      this.items[at] = this.items[below];
      at = below;
    }
    this.items[at] = last;
    return top;
  }
}

class Vocabulary {
  constructor(about) {
    this.about = about;
    this.ids = new Map(about.pieces.map((piece, id) => [piece, id]));
    this.special = new Set(about.special);
  }

  /** With the tokens that stand before every text. */
  encode(text) {
    const ids = this.encodeAll(text);
    return [...(ids.length || this.about.begins.length ? this.about.begins : [this.about.bos]), ...ids]; // never empty
  }

  /** The ids that a space and a text add to those of an earlier text, see `Tokenizer.encode_next`. */
  encodeNext(text) {
    return this.encodeAll(this.about.kind === "sentencepiece" ? text : ` ${text}`); // the former puts a space before every text
  }
}

class SentencePiece extends Vocabulary {
  constructor(about) {
    super(about);
    this.rules = about.rules ? new Rules(about.rules) : null;
    this.unknown = about.types.indexOf(UNKNOWN);
    this.hasBytes = about.types.includes(BYTE);
  }

  rank(left, right) {
    const id = this.ids.get(left + right);
    return id !== undefined && this.about.types[id] === NORMAL ? -this.about.scores[id] : undefined;
  }

  /** As SentencePiece reads a text: letters rewritten, spaces as a sign, one put before the text. */
  normalised(text) {
    let words = (this.rules ? this.rules.apply(text.toWellFormed()) : text.toWellFormed());
    if (this.about.strips) words = words.replace(/ {2,}/g, " ").replace(/^ |[ \u2581]+$/g, "");
    if (words && this.about.addsSpace) words = ` ${words}`;
    return words.replaceAll(" ", SPACE);
  }

  encodeAll(text) {
    const found = [];
    for (const piece of merged([...this.normalised(text)], this.rank.bind(this))) {
      const id = this.ids.get(piece);
      if (id !== undefined && this.about.types[id] === NORMAL) found.push(id);
      else if (this.hasBytes) for (const byte of utf8.encode(piece)) found.push(this.ids.get(nameOfByte(byte)));
      else if (found.at(-1) !== this.unknown) found.push(this.unknown); // unknown neighbours are one token
    }
    return found;
  }

  decode(ids) {
    const bytes = [];
    let isFirst = true;
    for (const id of ids) {
      if (this.special.has(id) || id >= this.about.pieces.length) continue;
      const piece = this.about.pieces[id];
      const plain = isFirst && this.about.addsSpace && piece.startsWith(SPACE) ? piece.slice(1) : piece;
      if (this.about.types[id] === BYTE) bytes.push(parseInt(piece.slice(3, 5), 16));
      else bytes.push(...utf8.encode(this.about.types[id] === UNKNOWN ? " \u2047 " : plain.replaceAll(SPACE, " ")));
      isFirst = false;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  }

  piece(id) {
    return this.about.pieces[id] ?? String(id);
  }
}

const nameOfByte = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;

/** The table by which SentencePiece rewrites letters: a double array trie (Aoe 1989) over UTF-8, then the new texts. */
class Rules {
  constructor(bytes) {
    const size = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    this.units = new Uint32Array(bytes.slice(4, 4 + size).buffer);
    this.texts = bytes.subarray(4 + size);
  }

  /** Length and new bytes of the longest rule that begins at a place; null if there is none. */
  longest(bytes, start) {
    const offset = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);
    let [node, found] = [offset(this.units[0]), null];
    for (let at = start; at < bytes.length; at++) {
      node ^= bytes[at];
      const unit = this.units[node];
      if (((unit & 0x800000ff) >>> 0) !== bytes[at]) break;
      node ^= offset(unit);
      if ((unit >>> 8) & 1) found = [at + 1 - start, this.units[node] & 0x7fffffff];
    }
    return found && [found[0], this.texts.subarray(found[1], this.texts.indexOf(0, found[1]))];
  }

  apply(text) {
    const [bytes, written] = [utf8.encode(text), []];
    for (let at = 0; at < bytes.length; ) {
      const length = bytes[at] < 0x80 ? 1 : bytes[at] < 0xe0 ? 2 : bytes[at] < 0xf0 ? 3 : 4;
      const [used, made] = this.longest(bytes, at) ?? [length, bytes.subarray(at, at + length)];
      written.push(...made);
      at += used;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(written));
  }
}

/** The letters that stand for the bytes in a byte-level vocabulary: printable ones for themselves, then from 256 on. */
function lettersOfBytes() {
  let more = 256;
  const isPlain = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPlain(byte) ? byte : more++));
}

class ByteLevel extends Vocabulary {
  constructor(about) {
    super(about);
    this.letters = lettersOfBytes();
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.ranks = new Map(about.merges.map((pair, rank) => [pair, rank])); // "left right"
    this.patterns = about.patterns.map((pattern) => new RegExp(pattern, "gu"));
    const whole = about.added.map(([content]) => content).sort((a, b) => b.length - a.length);
    this.addedIds = new Map(about.added);
    this.added = whole.length ? new RegExp(whole.map((each) => each.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&")).join("|"), "gu") : null;
  }

  encodeAll(text) {
    const found = [];
    let from = 0;
    const plain = (words) => this.words(words).forEach((word) => found.push(...this.ofWord(word)));
    for (const match of this.added ? text.toWellFormed().matchAll(this.added) : []) {
      plain(text.slice(from, match.index));
      found.push(this.addedIds.get(match[0]));
      from = match.index + match[0].length;
    }
    plain(text.slice(from));
    return found;
  }

  /** What is merged by itself: the matches of each pattern, and what lies between them. */
  words(text) {
    let parts = [this.about.nfc ? text.toWellFormed().normalize("NFC") : text.toWellFormed()];
    if (parts[0] && this.about.addsSpace && !parts[0].startsWith(" ")) parts[0] = ` ${parts[0]}`;
    for (const pattern of this.patterns) {
      parts = parts.flatMap((part) => {
        const cuts = [];
        let from = 0;
        for (const { 0: match, index } of part.matchAll(pattern)) {
          cuts.push(part.slice(from, index), match);
          from = index + match.length;
        }
        return [...cuts, part.slice(from)].filter(Boolean);
      });
    }
    return parts;
  }

  ofWord(word) {
    const symbols = Array.from(utf8.encode(word), (byte) => this.letters[byte]);
    const whole = this.about.ignoresMerges ? this.ids.get(symbols.join("")) : undefined;
    if (whole !== undefined) return [whole];
    return merged(symbols, (a, b) => this.ranks.get(`${a} ${b}`)).map((symbol) => this.ids.get(symbol)).filter((id) => id !== undefined);
  }

  decode(ids) {
    const known = ids.filter((id) => !this.special.has(id) && id < this.about.pieces.length);
    const names = new Map(this.about.added.map(([content, id]) => [id, content]));
    const bytes = known.flatMap((id) => names.has(id) ? [...utf8.encode(names.get(id))] : [...(this.about.pieces[id] ?? "")].map((letter) => this.bytes.get(letter)));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  }

  /** For display, with SentencePiece's sign for a space; bytes that are no text keep their letters. */
  piece(id) {
    const name = this.about.pieces[id];
    if (name === undefined || name === null) return String(id);
    if (this.about.added.some(([, each]) => each === id)) return name;
    const text = this.decode([id]);
    return text && !text.includes("\ufffd") ? text.replaceAll(" ", SPACE) : name;
  }
}

/** Without a tokenizer a text is token ids. */
class Numbers {
  encode(text) {
    return text.trim().split(/\s+/).filter((word) => /^\d{1,9}$/.test(word)).map(Number);
  }

  encodeNext(text) {
    return this.encode(text);
  }

  decode(ids) {
    return ids.join(" ");
  }

  piece(id) {
    return String(id);
  }
}
