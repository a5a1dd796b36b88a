// Words of a pattern in texts and names of the page, but for tokens, code and what the reader wrote.
(pattern) => {
  const own = "script, style, noscript, textarea, code, select[id^=of-], .piece, .chip, #name, #live-generated, .goes-on, .word-text";
  const texts = document.evaluate("//body//text()", document, null, XPathResult.ORDERED_NODE_SNAPSHOT_TYPE, null);
  const found = Array.from({ length: texts.snapshotLength }, (_, at) => texts.snapshotItem(at))
    .filter((node) => !node.parentElement.closest(`${own}, [lang]:not(html), [hidden]`)).map((node) => node.data);
  for (const element of document.querySelectorAll("[aria-label], [title], [placeholder]")) {
    if (element.closest(".put, .chip, .word-edit, code, [hidden]")) continue;
    found.push(...["aria-label", "title", "placeholder"].map((name) => element.getAttribute(name) ?? ""));
  }
  return [...new Set(found.flatMap((words) => words.match(new RegExp(pattern, "gu")) ?? []))];
}
