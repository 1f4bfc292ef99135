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
  let drawing = null, sliders = null, twin = null, late = 0, clock = 0;
  function build() {
    const left = drawing?.left();
    stop();
    el.replaceChildren();
    const { svg: text, title, legend, iterations, timeline } = model.get("picture"), svg = tfnbParse(text);
    const root = el.appendChild(document.createElement("div"));
    root.className = "tfnb-page";
    if (!svg) { root.textContent = "This picture could not be read."; return; }
    const bar = root.appendChild(document.createElement("div"));
    bar.className = "tfnb-bar";
    bar.appendChild(document.createElement("span")).textContent = title;
    for (const [word, colour] of legend || []) {
      const entry = bar.appendChild(document.createElement("span"));
      entry.className = "tfnb-key";
      const dot = document.createElement("span");
      dot.className = "tfnb-dot";
      if (/^#[0-9a-f]{6}$/.test(colour)) dot.style.background = colour;
      entry.append(dot, word);
    }
    root.appendChild(svg);
    drawing = tfnbDrawing(root, { ask, select, layout });
    if (iterations?.loops) sliders = tfnbIterations(root, iterations, { chosen: model.get("chosen"), changed: slid });
    const below = timeline && tfnbBelow(timeline);
    if (below) { root.appendChild(below); tfnbTimeline(root, drawing, sliders); }
    if (left) drawing.resume(left);
    glow();
  }
  function glow() {  // a site says by its colour where a box is done
    const shares = model.get("glow") || {};
    for (const stripe of el.querySelectorAll("svg rect.site")) {
      const share = shares[stripe.getAttribute("fill")] || 0;
      stripe.style.stroke = share ? stripe.getAttribute("fill") : "";
      stripe.style.strokeOpacity = 0.45;
      stripe.style.strokeWidth = `${7 * Math.min(1, share)}px`;
    }
  }
  function stop() {
    drawing?.stop();
    sliders?.stop();
    drawing = sliders = null;
    for (const answer of waiting.keys()) answer("");
  }
  function slid(chosen) {
    model.set("chosen", chosen);
    model.save_changes();
  }
  let kept = null;  // the faces that the static drawing holds: of the same picture, also when no kernel is left
  async function faces() {
    const data = twin && model.get("picture").name === model.get("twin") && twin.querySelector("script.tfnb-faces");
    return data ? (kept ||= await tfnbUnpacked(data)) : {};
  }
  async function ask(scope, unfold, patience = 15000) {
    const here = await faces();
    if (Object.hasOwn(here, scope)) return here[scope];
    model.send({ kind: unfold ? "unfold" : "fold", scope });
    return new Promise((resolve) => {
      const answer = (svg) => { clearTimeout(clock); waiting.delete(answer); resolve(svg); };
      const clock = setTimeout(answer, patience, "");
      waiting.set(answer, scope);
    });
  }
  let laid = null;  // who waits for a layout: only the last one matters
  function layout(opened) {
    laid?.answer("");
    return new Promise((answer) => {
      laid = { answer, opened: String(opened) };
      model.send({ kind: "layout", opened });
    });
  }
  function select(node) {
    model.set("selection", node);
    model.save_changes();
    clearTimeout(late);
    if (!node) return;
    drawing.tell(`${node}: …`);
    late = setTimeout(() => drawing?.tell(`${node}: no answer; is the kernel running?`), 30000);
    model.send({ kind: "fetch", node });
  }
  function heard(message) {
    if (message.kind === "layout") if (laid?.opened === String(message.opened)) laid.answer(message.svg);
    if (message.kind === "face") for (const [answer, scope] of waiting) if (scope === message.scope) answer(message.svg);
    if (message.kind === "value" && message.node === model.get("selection")) {
      clearTimeout(late);
      drawing?.tell(`${message.node}\n${message.error || message.preview}`, message.histogram);
    }
  }
  const listeners = {
    "msg:custom": heard, "change:picture": build, "change:glow": glow, "change:chosen": () => sliders?.set(model.get("chosen")),
  };
  build();
  for (const [kind, call] of Object.entries(listeners)) model.on(kind, call);
  let tries = 0;
  (function hide() {  // a front end may render before it puts the element into the page
    if (!el.isConnected && tries++ < 100) { clock = setTimeout(hide, 50); return; }
    twin = tfnbTwin(el, model.get("twin"));
    if (twin) { twin.dataset.hidden = "1"; twin.style.display = "none"; }
  })();
  return () => {
    clearTimeout(clock);
    clearTimeout(late);
    for (const [kind, call] of Object.entries(listeners)) model.off(kind, call);
    stop();
    if (twin) { delete twin.dataset.hidden; twin.style.display = ""; }
  };
}
export default { render };
