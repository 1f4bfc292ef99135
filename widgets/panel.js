// What is known of one box, beside the drawing until it is closed: words, links to what it takes and to who uses it, and
// what a kernel tells of its value. Text enters by textContent only.
function tfnbPanel(root, go, closed) {
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text) made.textContent = text;
    return made;
  };
  const panel = root.appendChild(make("section", "tfnb-panel"));  // below the picture in a narrow page
  panel.setAttribute("aria-label", "Details");
  const head = panel.appendChild(make("div", "tfnb-panel-head")), title = head.appendChild(make("b"));
  const close = head.appendChild(make("button", "", "×")), words = panel.appendChild(make("div", "tfnb-words"));
  const links = panel.appendChild(make("div", "tfnb-links")), value = panel.appendChild(make("div", "tfnb-value"));
  close.type = "button";
  close.setAttribute("aria-label", "Close the details");
  close.addEventListener("click", () => { hide(); closed(); });
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); closed(); }
    event.stopPropagation();  // a notebook has keys of its own
  });
  value.setAttribute("aria-live", "polite");
  hide();

  function hide() { panel.hidden = value.hidden = true; }
  function show({ label, takes, gives }) {
    const [name, ...lines] = label.split("\n");
    title.textContent = name;
    words.textContent = lines.join("\n");
    links.replaceChildren(...row("takes", takes), ...row("used by", gives));
    value.hidden = true;
    panel.hidden = false;
    const picture = root.querySelector("svg").getBoundingClientRect();
    panel.style.top = `${picture.top - root.getBoundingClientRect().top + 8}px`;
    panel.style.maxHeight = `${Math.max(120, picture.height - 16)}px`;
  }
  function row(word, ends) {
    if (!ends.length) return [];
    const made = make("div", "", `${word} `);
    for (const { key, text } of ends) {
      const link = made.appendChild(make("button", "", text));
      link.type = "button";
      link.addEventListener("click", () => go(key));
    }
    return [made];
  }
  function tell(text, histogram) {  // of the value
    value.hidden = panel.hidden = false;
    value.textContent = text;
    if (histogram) value.prepend(bars(histogram));
  }
  function bars({ counts, low, high }) {
    const SVG = "http://www.w3.org/2000/svg", most = Math.max(1, ...counts), figure = make("div", "tfnb-bars");
    const picture = figure.appendChild(document.createElementNS(SVG, "svg"));
    picture.setAttribute("viewBox", `0 0 ${4 * counts.length} 30`);
    counts.forEach((count, place) => {
      const high = count && Math.max(1, (30 * count) / most), bar = document.createElementNS(SVG, "rect");
      for (const [name, size] of [["x", 4 * place], ["y", 30 - high], ["width", 3], ["height", high]]) bar.setAttribute(name, size);
      picture.appendChild(bar);
    });
    figure.appendChild(make("span", "", `${low} to ${high}`));
    return figure;
  }
  return { show, hide, tell };
}
