// The language of a live page: the words of `words.js` are put into its elements, and the reader can choose.

let language = "en";

/** The first of the reader's languages that the page has. */
function ownLanguage() {
  const known = Object.keys(LANGUAGES);
  return navigator.languages.map((each) => known.find((name) => name.split("-")[0] === each.split("-")[0])).find(Boolean) ?? "en";
}

/** The words of a name in the language that is chosen. */
function t(name, ...values) {
  return placed(WORDS[name][Object.keys(LANGUAGES).indexOf(language)], values).join("");
}

const spoken = new Map();

/** An element says what a function returns, after a change of the language as well. */
function speak(id, words) {
  spoken.set(id, words);
  byId(id).textContent = words();
}

/** Elements say what their attributes data-say and data-label name; what English lacks in `WORDS` stands in page.html. */
function sayAll() {
  const said = (name, english) => (name in WORDS ? t(name) : language === "en" ? english : TOLD[name] ?? english);
  for (const element of document.querySelectorAll("[data-say]")) {
    element.dataset.english ??= element.textContent;
    const words = said(element.dataset.say, element.dataset.english);
    if (element.textContent !== words) element.textContent = words; // what stays keeps its markup
  }
  for (const element of document.querySelectorAll("[data-label]")) {
    element.dataset.englishLabel ??= element.getAttribute("aria-label") ?? "";
    element.setAttribute("aria-label", said(element.dataset.label, element.dataset.englishLabel));
  }
  for (const [id, words] of spoken) byId(id).textContent = words();
}

/** The switch of languages. Each name is written in its own language. */
function setUpLanguages(onChoice) {
  const names = Object.entries(LANGUAGES).map(([name, words]) => [name, make("span", { lang: name }, words)]);
  byId("language").hidden = false;
  segments(byId("language"), names, language, onChoice);
}
