// One drawing in a page: pan, zoom, search, fold and unfold, switches, details, keyboard. Used by static pages and by the
// widget. options.layout(keys of unfolded boxes) gives the whole drawing laid out anew, where there is a kernel.
//
// Python draws and lays out. Each box comes with two faces (card and frame); unfolding swaps them and stretches the
// level around it: along each axis a monotone map that is 1:1 between boxes. Text enters by textContent only.

// Where the first view of a drawing begins: in the middle where it shows all, else so that the loss is in it.
function tfnbBegin({ w, h }, loss, shown) {
  const within = (begin, size, part) => Math.max(0, Math.min(begin, size - part));
  return {
    x: shown.w < w ? within(loss.x - shown.w / 2, w, shown.w) : (w - shown.w) / 2,
    y: within(loss.end - shown.h, h, shown.h),
  };
}
function tfnbDrawing(root, options) {
  const svg = root.querySelector("svg");
  const HEAD = 32, TALLEST = 680, GAP = [16, 24];  // the least space between boxes, across and down
  const faces = options.faces || {}, parsed = new Map(), bases = new WeakMap();
  const listeners = [];
  const on = (target, kind, call, how) => {
    target.addEventListener(kind, call, how);
    listeners.push(() => target.removeEventListener(kind, call, how));
  };
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    made.className = className;
    if (text) made.textContent = text;
    return made;
  };
  const number = (el, name) => parseFloat(el.getAttribute(name)) || 0;
  const keyOf = (box) => box.getAttribute("data-key");
  const boxesOf = (level) => [...level.children].filter((el) => el.classList.contains("box"));
  const faceOf = (box) => box.querySelector(":scope > .face");
  const innerOf = (box) => box.querySelector(":scope > .face > .level");
  const levelOf = (box) => box.parentNode;
  const ownerOf = (level) => level.parentNode.closest(".box");
  let top = svg.querySelector(".level");
  const find = (key) => svg.querySelector(`.box[data-key="${CSS.escape(key)}"]`);
  const isOpen = (box) => !!innerOf(box);
  const isGroup = (box) => box.hasAttribute("aria-expanded");

  // ---- faces -------------------------------------------------------------------------------------------------
  function adopt(el) {  // titles become labels: the browser's own tooltip would lie over ours
    for (const title of [...el.querySelectorAll("title")]) {
      title.parentNode.setAttribute("aria-label", title.textContent);
      title.remove();
    }
    for (const box of el.querySelectorAll(".box")) box.setAttribute("tabindex", "-1");  // Tab passes; arrows go from box to box
  }
  function parse(text) {
    const whole = tfnbParse(`<svg xmlns="${svg.namespaceURI}">${text}</svg>`);
    if (whole) adopt(whole);
    return whole && whole.firstElementChild;
  }
  function otherFace(key) {  // the face that is not shown, if this page has it
    if (!parsed.has(key) && Object.hasOwn(faces, key)) parsed.set(key, parse(faces[key]));
    return parsed.get(key) || null;
  }

  // ---- geometry ----------------------------------------------------------------------------------------------
  const isOff = (box) => box.classList.contains("off");
  const sizeOf = (box) => (isOff(box) ? { w: 0, h: 0 } : fullSize(box));
  function fullSize(box) {
    const shape = [...faceOf(box).children].filter((el) => el.localName === "rect").pop();
    return { w: number(shape, "width"), h: number(shape, "height") };
  }
  function placeOf(box) {
    const [x, y] = box.getAttribute("transform").match(/-?[\d.]+/g).map(Number);
    return { x, y };
  }
  function baseOf(level) {  // as Python laid it out; taken before anything inside changes
    if (bases.has(level)) return bases.get(level);
    const base = { w: number(level, "data-w"), h: number(level, "data-h"), boxes: new Map(), wires: [], ports: [] };
    for (const el of level.children) {
      if (el.classList.contains("box")) base.boxes.set(el, { ...placeOf(el), ...fullSize(el) });
      else if (el.classList.contains("port")) base.ports.push([el, number(el, "cx")]);
      else if (el.classList.contains("wire")) {
        const [line, tip] = el.getAttribute("d").slice(1).split("M");
        const values = line.match(/-?[\d.]+/g).map(Number), points = [];
        for (let i = 0; i < values.length; i += 2) points.push([values[i], values[i + 1]]);
        base.wires.push({ el, points, tip: !!tip });
      }
    }
    bases.set(level, base);
    return base;
  }
  function axis(spans) {  // spans [from, to, factor] -> monotone map, 1:1 where no box is, else the largest factor
    const cuts = [...new Set(spans.flatMap(([a, b]) => [a, b]))].sort((a, b) => a - b);
    const slopes = cuts.slice(1).map((end, i) => {
      const over = spans.filter(([a, b]) => a <= cuts[i] && b >= end).map((span) => span[2]);
      return over.length ? Math.max(...over) : 1;
    });
    const marks = [cuts[0] || 0];
    slopes.forEach((slope, i) => marks.push(marks[i] + slope * (cuts[i + 1] - cuts[i])));
    return (p) => {
      if (!cuts.length || p <= cuts[0]) return p;
      let i = 0;
      while (i < slopes.length && p > cuts[i + 1]) i++;
      return marks[i] + (p - cuts[i]) * (i < slopes.length ? slopes[i] : 1);
    };
  }
  function portX(box, kind, name) {  // where an edge meets the frame of an unfolded box
    const level = innerOf(box);
    const port = level && [...level.children].find((el) => el.getAttribute(kind) === name);
    return port ? placeOf(box).x + placeOf(level).x + number(port, "cx") : null;
  }
  function endsOf(wire, points, boxes, height) {
    const tail = boxes.get(wire.el.dataset.tail), head = boxes.get(wire.el.dataset.head);
    const [first, last] = [points[0], points[points.length - 1]];
    let from = [first[0], -HEAD], to = [last[0], height];
    if (tail) {
      const depth = keyOf(tail).split(".").length;
      const x = portX(tail, "data-out", (wire.el.dataset.from || "").split(".")[depth]);
      const { w, h } = sizeOf(tail), { x: left, y } = placeOf(tail);
      from = [x ?? left + w / 2, y + h];
    }
    if (head) {
      const { x: left, y } = placeOf(head);
      to = [portX(head, "data-in", wire.el.dataset.tail) ?? left + sizeOf(head).w / 2, y];
    }
    return [from, to];
  }
  function pathOf(points, tip) {
    const text = points.map((p) => p.map((v) => v.toFixed(1)).join(","));
    let d = `M${text[0]}C${text.slice(1).join(" ")}`;
    if (tip) {
      const [x, y] = points[points.length - 1], [bx, by] = points[points.length - 2];
      const size = 4.5 / (Math.hypot(x - bx, y - by) || 1), ux = (x - bx) * size, uy = (y - by) * size;
      d += `M${x - 1.4 * ux - uy},${y - 1.4 * uy + ux}L${x},${y}L${x - 1.4 * ux + uy},${y - 1.4 * uy - ux}`;
    }
    return d;
  }
  function arrange(level) {  // put a level around the present sizes of its boxes
    const base = baseOf(level), byKey = new Map();
    const spans = [[], []];
    for (const [box, was] of base.boxes) {
      const now = sizeOf(box);
      spans[0].push([was.x, was.x + was.w, now.w / was.w], [was.x + was.w, was.x + was.w + GAP[0], +!isOff(box)]);
      spans[1].push([was.y, was.y + was.h, now.h / was.h], [was.y + was.h, was.y + was.h + GAP[1], +!isOff(box)]);
      byKey.set(keyOf(box), box);
    }
    const fx = axis(spans[0]), fy = axis(spans[1]), w = fx(base.w), h = fy(base.h);
    for (const [box, was] of base.boxes) {
      const now = sizeOf(box);
      const x = (fx(was.x) + fx(was.x + was.w) - now.w) / 2, y = (fy(was.y) + fy(was.y + was.h) - now.h) / 2;
      box.setAttribute("transform", `translate(${x.toFixed(1)},${y.toFixed(1)})`);
    }
    for (const [port, x] of base.ports) {
      port.setAttribute("cx", fx(x));
      if (port.hasAttribute("data-out")) port.setAttribute("cy", h);
    }
    for (const wire of base.wires) {
      const points = wire.points.map(([x, y]) => [fx(x), fy(y)]), n = points.length;
      const [from, to] = endsOf(wire, points, byKey, h);
      points[1][0] += from[0] - points[0][0];
      points[n - 2][0] += to[0] - points[n - 1][0];
      points[0] = from;
      points[n - 1] = to;
      wire.el.setAttribute("d", pathOf(points, wire.tip));
      wire.el.classList.toggle("off", [wire.el.dataset.tail, wire.el.dataset.head].some((key) => key && byKey.has(key) && isOff(byKey.get(key))));
    }
    level.setAttribute("data-w", w);
    level.setAttribute("data-h", h);
    const owner = ownerOf(level);
    if (!owner) return label();
    const frame = faceOf(owner).querySelector(":scope > .frame");
    const wide = Math.max(w, number(frame, "data-min"));
    frame.setAttribute("width", wide);
    frame.setAttribute("height", h + HEAD);
    level.setAttribute("transform", `translate(${(wide - w) / 2},${HEAD})`);
    arrange(levelOf(owner));
  }
  function swap(box, face) {
    for (let level = levelOf(box); level; level = ownerOf(level) && levelOf(ownerOf(level))) baseOf(level);
    const key = keyOf(box), old = faceOf(box);
    parsed.set(key, old);
    old.replaceWith(face);
    box.setAttribute("aria-expanded", String(isOpen(box)));
    if (!sift(box)) arrange(levelOf(box));
  }
  const toggle = (box) => turn(box, !isOpen(box));
  async function turn(box, open, quiet, patience) {  // open or closed; as it is already, also by another hand while this one waits
    if (!isGroup(box)) return false;
    if (isOpen(box) === open) return true;
    let face = otherFace(keyOf(box));
    if (!face && options.ask) {
      const text = await options.ask(keyOf(box), open, patience);
      if (isOpen(box) === open) return true;
      face = text ? parse(text) : null;
    }
    if (!face) {
      say(options.ask ? "No answer: is the kernel running, and not busy?" : "This graph is too large for a page: this box unfolds in the live drawing only.");
      return false;
    }
    const before = box.getBoundingClientRect();
    swap(box, face);
    if (!quiet) { settle(box, before); relayout(keyOf(box)); }
    return true;
  }
  const openKeys = () => [...svg.querySelectorAll('.box[aria-expanded="true"]')].map(keyOf);
  let layouts = 0;
  async function relayout(key) {  // as soon as a kernel answers; until then the level is stretched
    const opened = openKeys(), turn = ++layouts;
    const whole = options.layout && tfnbParse((await options.layout(opened).catch(() => "")) || "<none/>");
    const level = whole && whole.querySelector(":scope > .level");
    if (!level || turn !== layouts || String(openKeys()) !== String(opened)) return;
    const focused = svg.contains(document.activeElement) && document.activeElement.getAttribute("data-key");
    const pin = find(key), before = pin && pin.getBoundingClientRect();
    adopt(level);
    top.replaceWith(level);
    top = level;
    sift(svg);
    mark();
    if (focused) find(focused)?.focus({ preventScroll: true });
    if (chosen) { chosen = find(keyOf(chosen)); chosen?.classList.add("chosen"); }
    light(chosen, true);
    before && find(key) ? settle(find(key), before) : fit();
  }

  // ---- switches ----------------------------------------------------------------------------------------------
  const PASSES = ["forward", "gradient", "update", "variable"], off = new Set();
  function sift(around) {  // hide what is switched off inside of an element, and close the gaps; whether anything changed
    let changed = false;
    if (!off.size && !svg.querySelector(".off")) return false;
    svg.querySelectorAll(".level").forEach(baseOf);  // before anything changes
    for (const box of [...around.querySelectorAll(".box")].reverse()) {
      const hidden = (box.dataset.pass || "forward").split(" ").every((pass) => off.has(pass));
      changed ||= hidden || isOff(box);
      box.classList.toggle("off", hidden);
    }
    if (changed) for (const level of [...around.querySelectorAll(".level")].reverse()) arrange(level);
    return changed;
  }
  function upgrade(entry) {  // a word of the legend switches its pass
    const word = entry.textContent;
    if (!PASSES.includes(word)) return;
    const set = (shown) => { entry.setAttribute("aria-checked", shown); shown ? off.delete(word) : off.add(word); };
    for (const [name, value] of [["role", "switch"], ["tabindex", "0"], ["title", `Show or hide: ${word}`]]) entry.setAttribute(name, value);
    const flip = () => { set(entry.getAttribute("aria-checked") !== "true"); sift(svg); tall(); view.moved ? show() : fit(); };
    set(true);
    on(entry, "click", flip);
    on(entry, "keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); flip(); } });
  }
  function switchClass(text, label, name, call) {
    const made = button(text, label, () => { made.setAttribute("aria-pressed", svg.classList.toggle(name)); call?.(); });
    made.setAttribute("aria-pressed", "false");
  }
  function label() {  // shapes beside the edges
    for (const el of svg.querySelectorAll("text.spec")) el.remove();
    if (!svg.classList.contains("specs")) return;
    for (const wire of svg.querySelectorAll(".wire:not(.order):not(.off)")) {
      const shapes = (wire.getAttribute("aria-label") || "").split("\n").map((line) => line.split("  ")[1]).filter(Boolean);
      const length = wire.getTotalLength() - (wire.dataset.head ? 13 : 0);  // without the tip
      if (!shapes.length || length < 12) continue;
      const { x, y } = wire.getPointAtLength(length / 2), text = document.createElementNS(svg.namespaceURI, "text");
      for (const [name, value] of [["class", "spec soft halo"], ["x", x + 5], ["y", y + 3], ["font-size", 9]]) text.setAttribute(name, value);
      text.textContent = shapes[0].replace("float", "f").replace(/^(u?)int/, "$1i") + (shapes.length > 1 ? ` +${shapes.length - 1}` : "");
      wire.parentNode.appendChild(text);
    }
  }

  // ---- the view ----------------------------------------------------------------------------------------------
  const view = { x: 0, y: 0, scale: 1, ready: false };
  const LEGIBLE = parseFloat(svg.style.minWidth) / number(svg, "width") || 0;  // the least size of text, of its natural one
  const extent = () => ({ w: number(top, "data-w"), h: number(top, "data-h") });
  function show() {
    const wide = svg.clientWidth || 1, high = svg.clientHeight || 1;
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${wide / view.scale} ${high / view.scale}`);
  }
  function tall() {
    svg.style.height = `${Math.max(120, Math.min(TALLEST, extent().h * view.scale))}px`;
  }
  function fit(whole) {
    const { w, h } = extent(), wide = svg.clientWidth;
    if (!wide) return;
    const across = Math.min(1, wide / w);
    show();
    const loss = lossAt();
    view.scale = whole ? Math.min(across, TALLEST / h) : Math.max(across, LEGIBLE);  // what is longer or wider scrolls
    tall();
    Object.assign(view, tfnbBegin({ w, h }, loss, { w: wide / view.scale, h: svg.clientHeight / view.scale }), { ready: true, moved: false });
    show();
  }
  function lossAt() {  // the middle of the lowest box of the forward pass, and where that ends
    const page = svg.getBoundingClientRect(), found = { x: 0, end: 0 };
    for (const box of svg.querySelectorAll('.box:not([data-pass]):not([aria-expanded="true"])')) {
      const { left, width, bottom } = box.getBoundingClientRect();
      const end = view.y + (bottom - page.top) / view.scale + GAP[1];
      if (end > found.end) Object.assign(found, { x: view.x + (left + width / 2 - page.left) / view.scale, end });
    }
    return found;
  }
  function zoom(factor, at) {
    const box = svg.getBoundingClientRect();
    const px = at ? at.clientX - box.left : box.width / 2, py = at ? at.clientY - box.top : box.height / 2;
    const scale = Math.min(8, Math.max(0.05, view.scale * factor));
    view.moved = true;
    view.x += px / view.scale - px / scale;
    view.y += py / view.scale - py / scale;
    view.scale = scale;
    show();
  }
  function settle(box, before) {  // keep what was clicked under the pointer
    tall();
    show();
    const now = box.getBoundingClientRect(), page = svg.getBoundingClientRect();
    const beyond = before.left + now.width + 12 - page.right;
    const aside = isOpen(box) ? Math.max(0, Math.min(beyond, before.left - page.left - 12)) : 0;
    view.x += (now.left - before.left + aside) / view.scale;
    view.y += (now.top - before.top) / view.scale;
    show();
  }
  function centre(box) {
    const where = box.getBoundingClientRect(), page = svg.getBoundingClientRect();
    view.x += (where.left + where.width / 2 - page.left - page.width / 2) / view.scale;
    view.y += (where.top + Math.min(where.height, page.height) / 2 - page.top - page.height / 2) / view.scale;
    show();
  }

  // ---- tools -------------------------------------------------------------------------------------------------
  const bar = root.querySelector(".tfnb-bar") || root.insertBefore(make("div", "tfnb-bar"), root.firstChild);
  const tools = bar.appendChild(make("span", "tfnb-tools"));
  const tip = root.appendChild(make("div", "tfnb-tip")), note = root.appendChild(make("div", "tfnb-note"));
  note.setAttribute("role", "status");
  tip.hidden = true;
  function say(text) { note.textContent = text; }
  function button(text, label, call) {
    const made = tools.appendChild(make("button", "", text));
    made.type = "button";
    made.title = label;
    made.setAttribute("aria-label", label);
    on(made, "click", call);
    return made;
  }
  const search = tools.appendChild(make("input", ""));
  search.type = "search";
  search.placeholder = "find  /regex/";
  search.setAttribute("aria-label", "Find nodes by name, operation or line");
  const tally = tools.appendChild(make("span", "tfnb-tally"));
  button("+", "Zoom in", () => zoom(1.25));
  button("−", "Zoom out", () => zoom(0.8));
  button("Fit", "Show the whole graph", () => fit(true));
  button("Unfold", "Unfold one more level", () => unfoldAll());
  button("Fold", "Fold all", () => foldAll());
  switchClass("Shapes", "Write shapes beside the edges", "specs", label);
  if (svg.querySelector(".order") || Object.values(faces).some((face) => face.includes("wire order"))) switchClass("Order", "Show what only runs before", "orders");
  button("SVG", "Save the picture as it is now", () => save());

  async function unfoldAll() {
    const folded = [...svg.querySelectorAll('.box[aria-expanded="false"]')];
    for (const box of folded) {
      if (svg.querySelectorAll(".box").length > 150) { say("150 boxes are shown; unfold single boxes by a click."); break; }
      await turn(box, true, true);
    }
    fit();
    await relayout("");
  }
  async function foldAll() {
    for (const box of [...top.querySelectorAll('.box[aria-expanded="true"]')].reverse()) await turn(box, false, true);
    fit();
    await relayout("");
  }
  function save() {
    const copy = svg.cloneNode(true), { w, h } = extent();
    copy.setAttribute("viewBox", `0 0 ${w} ${h}`);
    copy.setAttribute("width", w);
    copy.setAttribute("height", h);
    copy.removeAttribute("style");
    const link = make("a", "");
    link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
    link.download = "graph.svg";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // ---- search ------------------------------------------------------------------------------------------------
  let hits = [], current = -1;
  function* everyBox(level) {
    for (const box of boxesOf(level)) {
      yield box;
      const inside = innerOf(box) || (isGroup(box) && otherFace(keyOf(box))?.querySelector(":scope > .level"));
      if (inside) yield* everyBox(inside);
    }
  }
  function tester(text) {
    const pattern = text.match(/^\/(.+)\/$/);
    if (pattern) try { const regex = new RegExp(pattern[1], "im"); return (words) => regex.test(words); } catch { /* as text */ }
    return (words) => words.toLowerCase().includes(text.toLowerCase());
  }
  function mark() {
    for (const el of svg.querySelectorAll(".hit,.holds")) el.classList.remove("hit", "holds");
    for (const key of hits) {
      const parts = key.split(".");
      for (let n = parts.length; n > 0; n--) {
        const box = find(parts.slice(0, n).join("."));
        if (box) { box.classList.add(n === parts.length ? "hit" : "holds"); break; }
      }
    }
  }
  function look() {
    const text = search.value.trim(), matches = text && tester(text);
    const words = (box) => {  // the quoted line counts for the line's own box only, not for all inside
      const label = box.getAttribute("aria-label") || "";
      return keyOf(box).includes(".") ? label.replace(/\n.* line \d+: .*$/, "") : label;
    };
    const found = text ? [...everyBox(top)].filter((box) => matches(words(box))).map(keyOf) : [];
    const around = new Set(found.flatMap((key) => [...key.matchAll(/\./g)].map((dot) => key.slice(0, dot.index))));
    hits = found.filter((key) => !around.has(key));  // what matches inside of a box that matches is the hit
    current = -1;
    mark();
    tally.textContent = text ? `${hits.length} found` : "";
  }
  async function next(step) {
    if (!hits.length) return;
    current = (current + step + hits.length) % hits.length;
    tally.textContent = `${current + 1} of ${hits.length}`;
    await reveal(hits[current]);
    mark();
  }
  async function reveal(key) {
    const parts = key.split(".");
    for (let n = 1; n < parts.length; n++) {
      const box = find(parts.slice(0, n).join("."));
      if (box) await turn(box, true, true);
    }
    tall();
    show();
    const box = find(key);
    if (box) { centre(box); light(box, true); }
  }
  on(search, "input", look);
  on(search, "keydown", (event) => {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { search.value = ""; look(); svg.focus({ preventScroll: true }); }
    event.stopPropagation();
  });

  // ---- what belongs together ---------------------------------------------------------------------------------
  function light(box, far) {
    for (const el of svg.querySelectorAll(".lit,.near,.used")) el.classList.remove("lit", "near", "used");
    if (!box) return;
    const wires = [...levelOf(box).children].filter((el) => el.classList.contains("wire"));
    for (const [here, there] of [["head", "tail"], ["tail", "head"]]) {
      const seen = new Set([keyOf(box)]), queue = [keyOf(box)];
      while (queue.length) {
        const key = queue.shift();
        for (const wire of wires.filter((el) => el.dataset[here] === key)) {
          const end = wire.dataset[there];
          wire.classList.add(key === keyOf(box) ? "lit" : "near");
          if (far && end && !seen.has(end)) { seen.add(end); queue.push(end); }
        }
      }
    }
    for (const key of (box.dataset.uses || "").split(" ").filter(Boolean)) nearest(key)?.classList.add("used");
  }
  function nearest(key) {  // the box of a key, or the folded one around it
    const parts = key.split(".");
    while (parts.length && !find(parts.join("."))) parts.pop();
    return parts.length ? find(parts.join(".")) : null;
  }
  function point(key) {  // what something beside the drawing points at
    svg.querySelector(".pointed")?.classList.remove("pointed");
    const box = key ? nearest(key) : null;
    box?.classList.add("pointed");
    light(box || chosen, true);
  }
  let hinted = null, wait = 0;
  function hint(target, event) {  // after a moment of rest
    if (target === hinted && !tip.hidden) return put(event);
    clearTimeout(wait);
    tip.hidden = true;
    hinted = target;
    if (target) wait = setTimeout(() => { tip.textContent = target.getAttribute("aria-label"); tip.hidden = false; put(event); }, 250);
  }
  function put(event) {
    const page = root.getBoundingClientRect();
    const x = event.clientX - page.left + 14, y = event.clientY - page.top + 16;
    tip.style.left = `${Math.max(0, Math.min(x, page.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + tip.offsetHeight > page.height ? Math.max(0, y - tip.offsetHeight - 26) : y}px`;
  }

  // ---- pointer and keys --------------------------------------------------------------------------------------
  let drag = null, chosen = null;
  const active = () => root.contains(document.activeElement);
  const boxAt = (event) => event.target.closest && event.target.closest(".box");
  function select(box) {
    chosen?.classList.remove("chosen");
    chosen = box;
    box?.classList.add("chosen");
    light(box, true);
    box ? panel.show({ label: box.getAttribute("aria-label") || "", ...ends(box) }) : panel.hide();
    if (options.select) options.select((box && box.dataset.node) || "");
  }
  function ends(box) {  // what a box takes and who uses it, of the boxes that are shown
    const key = keyOf(box), inside = (one) => one === key || one.startsWith(`${key}.`);
    const takes = new Map(), gives = new Map();
    const add = (ends, to, text) => to && !inside(keyOf(to)) && !ends.has(keyOf(to)) && ends.set(keyOf(to), text);
    for (const wire of svg.querySelectorAll(".wire:not(.off)")) {
      const { head = "", from, tail } = wire.dataset, words = (wire.getAttribute("aria-label") || "").split("\n")[0];
      if (inside(head)) add(takes, nearest(from || tail), words === "runs first" ? `${titleOf(nearest(tail)) || tail} (runs first)` : words);
      if (head && inside(from || tail) && !isOpen(find(head))) add(gives, find(head), titleOf(find(head)));
    }
    for (const use of (box.dataset.uses || "").split(" ").filter(Boolean)) add(takes, nearest(use), titleOf(nearest(use) || box));
    const list = (ends) => [...ends].slice(0, 24).map(([key, text]) => ({ key, text: text || key }));
    return { takes: list(takes), gives: list(gives) };
  }
  const panel = tfnbPanel(root, async (key) => { await reveal(key); const box = find(key); if (box) { select(box); moveTo(box); } }, () => { select(null); svg.focus({ preventScroll: true }); });
  function press(box, event) {  // a frame reacts on its title only; inside it is paper
    if (isOpen(box) && event.clientY - box.getBoundingClientRect().top > HEAD * view.scale) return select(null);
    select(box);
    if (isGroup(box)) toggle(box);
  }
  on(svg, "pointerdown", (event) => {
    hint(null);
    if (event.button === 0) drag = { x: event.clientX, y: event.clientY, moved: false, id: event.pointerId };
    (boxAt(event) || svg).focus({ preventScroll: true });
  });
  on(svg, "pointermove", (event) => {
    if (!drag) return hint(event.target.closest(".wire,.box"), event), light(boxAt(event) || chosen, !boxAt(event));
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    if (!drag.moved) svg.setPointerCapture(drag.id);
    drag = { ...drag, x: event.clientX, y: event.clientY, moved: true };
    view.moved = true;
    view.x -= dx / view.scale;
    view.y -= dy / view.scale;
    show();
  });
  on(svg, "pointerup", (event) => {
    if (drag && !drag.moved) boxAt(event) ? press(boxAt(event), event) : select(null);
    drag = null;
  });
  on(svg, "pointercancel", () => { drag = null; });
  on(svg, "pointerleave", () => { hint(null); if (!drag) light(chosen, true); });
  on(svg, "wheel", (event) => {
    if (!active() && !event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), event);
  }, { passive: false });
  on(svg, "focusin", (event) => { const box = boxAt(event); if (box) light(box, true); });

  function neighbour(box, key) {
    const level = levelOf(box), wires = [...level.children].filter((el) => el.classList.contains("wire"));
    const along = key === "ArrowDown" ? ["tail", "head"] : ["head", "tail"];
    if (key === "ArrowDown" || key === "ArrowUp") {
      const ends = wires.filter((el) => el.dataset[along[0]] === keyOf(box)).map((el) => find(el.dataset[along[1]] || ""));
      return ends.find((end) => end && !isOff(end));
    }
    const row = boxesOf(level).filter((one) => !isOff(one)).sort((a, b) => placeOf(a).x - placeOf(b).x || placeOf(a).y - placeOf(b).y);
    return row[row.indexOf(box) + (key === "ArrowRight" ? 1 : -1)];
  }
  function moveTo(box) {
    if (!box) return;
    box.focus({ preventScroll: true });
    const where = box.getBoundingClientRect(), page = svg.getBoundingClientRect();
    if (where.top < page.top || where.bottom > page.bottom || where.left < page.left || where.right > page.right) centre(box);
  }
  const KEYS = {
    "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), "0": () => fit(true), f: () => fit(true),
    "/": () => search.focus(),
    Escape: (box) => { const owner = box && ownerOf(levelOf(box)); if (owner) return moveTo(owner); select(null); svg.focus({ preventScroll: true }); },
    "?": () => say("Arrows go along edges and rows, Shift and down into a box, Escape out of it; Enter folds and shows details; + − 0 zoom, / finds."),
    Enter: (box) => { if (box) { select(box); toggle(box); } },
  };
  KEYS[" "] = KEYS.Enter;
  on(svg, "keydown", (event) => {
    const box = boxAt(event);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowDown" && event.shiftKey && box) moveTo(innerOf(box) && boxesOf(innerOf(box)).find((one) => !isOff(one)));
    else if (event.key.startsWith("Arrow")) moveTo(box ? neighbour(box, event.key) : boxesOf(top).find((one) => !isOff(one)));
    else if (KEYS[event.key]) KEYS[event.key](box);
    else return;
    event.preventDefault();
    event.stopPropagation();  // a notebook has keys of its own
  });

  // ---- as another picture of the same graph was left ----------------------------------------------------------
  const titleOf = (box) => faceOf(box).querySelector(":scope > text")?.textContent;
  const boxes = () => new Map([...svg.querySelectorAll(".box")].map((box) => [keyOf(box), [titleOf(box), isOpen(box)]]));
  async function resume({ boxes: left, view: seen }) {
    for (const [key, [title, opened]] of left) {  // outer boxes come first
      const box = find(key);
      if (box && titleOf(box) === title) await turn(box, opened, true, 600000);  // other cells may run first
    }
    const same = JSON.stringify([...boxes().keys()]) === JSON.stringify([...left.keys()]);
    same && seen.moved ? (Object.assign(view, seen), tall(), show()) : fit();
  }

  // ---- start -------------------------------------------------------------------------------------------------
  adopt(svg);
  bar.querySelectorAll(".tfnb-key").forEach(upgrade);
  svg.setAttribute("role", "group");
  svg.setAttribute("tabindex", "0");
  svg.classList.add("live");
  const paper = svg.querySelector(".paper");
  for (const [name, value] of [["x", -1e5], ["y", -1e5], ["width", 2e5], ["height", 2e5]]) paper.setAttribute(name, value);
  Object.assign(svg.style, { width: "100%", minWidth: "0", maxWidth: "none" });
  const watch = new ResizeObserver(() => (view.ready ? show() : fit()));
  watch.observe(svg);
  fit();
  return {
    toggle: (key) => find(key) && toggle(find(key)), reveal, fit, say, select, point, tell: panel.tell,
    left: () => ({ boxes: boxes(), view: { ...view } }), resume,
    stop() { clearTimeout(wait); watch.disconnect(); listeners.forEach((off) => off()); },
  };
}
