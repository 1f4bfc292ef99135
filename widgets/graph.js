// The live drawing: asks Python for values and for faces it lacks, and stands in for the static drawing above it.
function tfnbTwin(el, name) {  // the nearest static drawing before this element that shows the same picture
  for (let around = el.parentElement; around && name; around = around.parentElement) {
    const same = [...around.querySelectorAll(`.tfnb-page[data-tfnb="${CSS.escape(name)}"]`)]
      .filter((page) => page.compareDocumentPosition(el) & Node.DOCUMENT_POSITION_FOLLOWING && !page.dataset.hidden);
    if (same.length) return same.pop();
  }
  return null;
}
function render({ model, el }) {
  const waiting = new Map();
  let drawing = null, twin = null, value = null, late = 0;
  function build() {
    if (drawing) drawing.stop();
    el.replaceChildren();
    const svg = tfnbParse(model.get("svg"));
    const root = el.appendChild(document.createElement("div"));
    root.className = "tfnb-page";
    if (!svg) { root.textContent = "This picture could not be read."; return; }
    const bar = root.appendChild(document.createElement("div"));
    bar.className = "tfnb-bar";
    bar.appendChild(document.createElement("span")).textContent = model.get("title");
    for (const [word, colour] of model.get("legend") || []) {
      const entry = bar.appendChild(document.createElement("span")), dot = document.createElement("span");
      dot.className = "tfnb-dot";
      if (/^#[0-9a-f]{6}$/.test(colour)) dot.style.background = colour;
      entry.append(dot, word);
    }
    root.appendChild(svg);
    value = document.createElement("div");
    value.className = "tfnb-value";
    value.setAttribute("aria-live", "polite");
    value.hidden = true;
    drawing = tfnbDrawing(root, { ask, select });
    root.appendChild(value);
  }
  let kept = null;  // the faces that the static drawing holds: the same picture, also when no kernel is left
  function ask(scope, unfold) {
    const data = twin && twin.querySelector('script[type="application/json"]');
    kept ||= data && JSON.parse(data.textContent);
    if (kept && Object.hasOwn(kept, scope)) return kept[scope];
    model.send({ kind: unfold ? "unfold" : "fold", scope });
    return new Promise((resolve) => {
      const clock = setTimeout(() => resolve(""), 15000);
      waiting.set(scope, (svg) => { clearTimeout(clock); resolve(svg); });
    });
  }
  function select(node) {
    model.set("selection", node);
    model.save_changes();
    if (!node) return;
    value.hidden = false;
    value.textContent = `${node}: …`;
    clearTimeout(late);
    late = setTimeout(() => { value.textContent = `${node}: no answer; is the kernel running?`; }, 30000);
    model.send({ kind: "fetch", node });
  }
  function heard(message) {
    if (message.kind === "face" && waiting.has(message.scope)) {
      waiting.get(message.scope)(message.svg);
      waiting.delete(message.scope);
    }
    if (message.kind === "value" && message.node === model.get("selection")) {
      clearTimeout(late);
      value.textContent = `${message.node}\n${message.error || message.preview}`;
    }
  }
  const chosen = () => { if (!model.get("selection") && value) value.hidden = true; };
  build();
  model.on("msg:custom", heard);
  model.on("change:svg", build);
  model.on("change:selection", chosen);
  let tries = 0, clock = 0;
  (function hide() {  // a front end may render before it puts the element into the page
    if (!el.isConnected && tries++ < 100) { clock = setTimeout(hide, 50); return; }
    twin = tfnbTwin(el, model.get("twin"));
    if (twin) { twin.dataset.hidden = "1"; twin.style.display = "none"; }
  })();
  return () => {
    clearTimeout(clock);
    clearTimeout(late);
    model.off("msg:custom", heard);
    model.off("change:svg", build);
    model.off("change:selection", chosen);
    if (drawing) drawing.stop();
    if (twin) { delete twin.dataset.hidden; twin.style.display = ""; }
  };
}
export default { render };
