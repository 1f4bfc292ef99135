// Sliders over the iterations of loops: what the nodes inside gave and took in the iteration that was chosen.
//
// data.loops: {around: the loop around it or -1, every, total, iterations: [[number, iteration of the loop around it], ...]}.
// data.nodes: key of a box -> [loop, then for each of its iterations: iteration, two words, tenths of microseconds or -1].
// data.gives: key of a group -> the node whose values it shows. data.sides: [loop, keys, iterations in which it was taken].
// options.chosen: where the sliders start; options.changed(chosen) hears of each move of a hand.
function tfnbIterations(root, data, options = {}) {
  const svg = root.querySelector("svg"), { loops, words } = data;
  const first = new WeakMap();  // what an element said before
  const chosen = loops.map(() => null);  // an iteration of each loop, or null for all of them
  const followers = [];  // what is told which iterations are shown
  const series = Object.entries(data.nodes).map(([key, [loop, ...flat]]) => {
    const notes = new Map();
    for (let i = 0; i < flat.length; i += 4) notes.set(flat[i], { short: flat[i + 1], long: flat[i + 2], took: flat[i + 3] });
    return { key, loop, notes };
  });
  const byKey = new Map(series.map((one) => [one.key, one]));
  const sides = data.sides.map(([loop, keys, taken]) => ({ loop, keys, taken: new Set(taken) }));

  // ---- which iterations ---------------------------------------------------------------------------------------------
  const around = (loop) => loops[loop].around;
  function within(loop) {  // the iterations among which one of this loop is chosen: those of one iteration of the loop around it
    const { iterations } = loops[loop], outer = around(loop);
    const which = outer < 0 ? -1 : chosen[outer] ?? (iterations.length ? iterations[0][1] : -1);
    return iterations.map((_, at) => at).filter((at) => iterations[at][1] === which);
  }
  function matching(loop) {  // the iterations that are shown, or null for all of them
    if (chosen[loop] !== null) return new Set([chosen[loop]]);
    const outer = around(loop) < 0 ? null : matching(around(loop));
    return outer && new Set(loops[loop].iterations.map((_, at) => at).filter((at) => outer.has(loops[loop].iterations[at][1])));
  }
  function choose(loop, place) {  // 0: all
    const outer = around(loop), iterations = within(loop);
    const at = place > 0 && iterations.length ? iterations[Math.min(place, iterations.length) - 1] : null;
    if (at !== null && outer >= 0 && chosen[outer] === null) pick(outer, loops[loop].iterations[at][1]);
    pick(loop, at);
    apply();
    options.changed?.([...chosen]);
  }
  function chooseIteration(loop, at) {  // whatever iterations of the loops around it that needs
    const outer = around(loop);
    if (outer >= 0) chooseIteration(outer, loops[loop].iterations[at][1]);
    choose(loop, within(loop).indexOf(at) + 1);
  }
  function set(wanted) {  // as another view of these loops has them; of other loops, all iterations
    const fits = wanted.length === loops.length && loops.every(({ iterations, around: outer }, loop) => {
      const at = wanted[loop];
      return at === null || (iterations[at] && (outer < 0 || iterations[at][1] === wanted[outer]));
    });
    loops.forEach((_, loop) => { chosen[loop] = fits ? wanted[loop] : null; });
    apply();
  }
  function pick(loop, at) {  // iterations of the loops inside keep their number, where there is one
    const inner = loops.map((one, place) => place).filter((place) => around(place) === loop);
    const numbers = inner.map((place) => (chosen[place] === null ? null : loops[place].iterations[chosen[place]][0]));
    chosen[loop] = at;
    if (at !== null && around(loop) >= 0 && chosen[around(loop)] === null) pick(around(loop), loops[loop].iterations[at][1]);
    inner.forEach((place, i) => {
      const same = at === null || numbers[i] === null ? [] : within(place).filter((iteration) => loops[place].iterations[iteration][0] <= numbers[i]);
      pick(place, same.length ? same.pop() : null);
    });
  }

  // ---- words ---------------------------------------------------------------------------------------------------
  function duration(tenths) {
    const us = tenths / 10;
    return us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(2)} ms` : `${us.toFixed(us < 10 ? 1 : 0)} us`;
  }
  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  function label(loop) {
    const { every, total, iterations } = loops[loop], among = within(loop), at = chosen[loop];
    const kept = every > 1 ? `, every ${every}th is kept` : "";
    const shown = matching(loop);
    if (at === null) return `all ${plural(shown && every === 1 ? among.length : total, "iteration")}${kept}`;
    const count = around(loop) < 0 ? total : every === 1 ? among.length : null;
    return `iteration ${(iterations[at][0] + 1).toLocaleString("en")}${count ? ` of ${count.toLocaleString("en")}` : ""}${kept}`;
  }
  function found(one) {  // the notes of a node in the iterations that are shown, or null where all are
    const shown = matching(one.loop);
    return shown && [...shown].map((at) => one.notes.get(at)).filter(Boolean);
  }
  const took = (notes) => notes.reduce((sum, note) => (note.took < 0 ? sum : (sum ?? 0) + note.took), null);

  // ---- the page ------------------------------------------------------------------------------------------------
  function write(el, text) {  // null: what stood there at first
    if (!el) return;
    if (!first.has(el)) first.set(el, el.textContent);
    const wanted = text ?? first.get(el);
    if (el.textContent !== wanted) el.textContent = wanted;
  }
  function tell(box, lines) {
    const said = first.get(box) || box.getAttribute("aria-label") || "";
    if (!first.has(box)) first.set(box, said);
    box.setAttribute("aria-label", lines ? `${said}\n${lines}` : said);
  }
  function inside(box) {  // the nodes of a box that ran in some iteration
    const key = box.getAttribute("data-key");
    return byKey.has(key) ? [byKey.get(key)] : series.filter((one) => one.key.startsWith(`${key}.`));
  }
  function ran(box, notes) {  // whether anything of a box ran in the iterations that are shown; null: nothing is known
    const key = box.getAttribute("data-key");
    if (notes.some((list) => list.length)) return true;
    const known = sides.filter(({ keys }) => keys.some((one) => one === key || one.startsWith(`${key}.`)));
    const shown = known.filter(({ loop }) => matching(loop));
    const whole = shown.filter(({ loop, keys, taken }) => {
      const inner = inside(box).map((one) => one.key);
      return inner.every((one) => keys.includes(one)) && ![...matching(loop)].some((at) => taken.has(at));
    });
    return notes.length || whole.length ? false : null;
  }
  function show(box) {
    const all = inside(box), lists = all.map(found), notes = lists.filter(Boolean);
    box.classList.toggle("unran", ran(box, notes) === false && notes.length === all.length);
    const face = box.querySelector(":scope > .face"), card = face.querySelector(":scope > .card");
    const own = byKey.get(data.gives[box.getAttribute("data-key")]) || (all.length === 1 ? all[0] : null);
    const given = own && found(own), iteration = face.querySelector(":scope > text.iteration");
    if (!card || !iteration && !face.querySelector(":scope > text.took") || !notes.length) {
      write(iteration, null);
      write(face.querySelector(":scope > text.took"), null);
      return tell(box, "");
    }
    const time = notes.length === all.length ? took(notes.flat()) : null;
    const one = given && given.length === 1 ? given[0] : null;
    const times = given ? (one ? words[one.short] : given.length ? plural(given.length, "time") : "not run") : null;
    write(iteration, times);
    write(face.querySelector(":scope > text.took"), notes.length === all.length ? (time === null ? "" : duration(time)) : null);
    if (!own) return tell(box, time === null ? "" : duration(time));
    const lines = [one && words[one.long], time !== null && duration(time)].filter(Boolean).join("\n");
    tell(box, `${label(own.loop)}: ${lines || times}`);
  }
  function draw(slider) {
    const loop = +slider.dataset.loop, among = within(loop), at = chosen[loop];
    const place = at === null ? 0 : among.indexOf(at) + 1, text = label(loop);
    const wide = +slider.querySelector(".track").getAttribute("width");
    slider.querySelector(".thumb").setAttribute("cx", among.length ? (wide * place) / among.length : 0);
    write(slider.querySelector("text"), text);
    const said = { role: "slider", tabindex: 0, "aria-label": "Iteration of the loop", "aria-valuemin": 0, "aria-valuemax": among.length, "aria-valuenow": place, "aria-valuetext": text };
    for (const [name, value] of Object.entries(said)) if (slider.getAttribute(name) !== String(value)) slider.setAttribute(name, value);
  }
  function apply() {
    svg.querySelectorAll(".iterations").forEach(draw);
    svg.querySelectorAll(".box").forEach(show);
    followers.forEach((tell) => tell(matching));
  }
  function follow(tell) {
    followers.push(tell);
    tell(matching);
  }

  // ---- pointer and keys: before the drawing, which would pan or fold -------------------------------------------
  let held = null;
  const at = (event) => event.target.closest?.(".iterations");
  function slide(event) {
    const loop = +held.dataset.loop, track = held.querySelector(".track").getBoundingClientRect();
    choose(loop, Math.round(((event.clientX - track.left) / track.width) * within(loop).length));
  }
  function on(kind, call) {
    svg.addEventListener(kind, (event) => { if (call(event)) event.stopPropagation(); }, { capture: true });
  }
  on("pointerdown", (event) => {
    held = event.button === 0 ? at(event) : null;
    if (!held) return !!at(event);
    held.focus({ preventScroll: true });
    svg.setPointerCapture(event.pointerId);
    slide(event);
    return true;
  });
  on("pointermove", (event) => { if (held) slide(event); return !!held; });
  on("pointerup", () => { const was = held; held = null; return !!was; });
  on("pointercancel", () => { held = null; return false; });
  const STEPS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9 };
  on("keydown", (event) => {
    const slider = at(event), step = STEPS[event.key];
    if (!slider || !step || event.ctrlKey || event.metaKey || event.altKey) return false;
    const loop = +slider.dataset.loop, among = within(loop);
    const now = chosen[loop] === null ? 0 : among.indexOf(chosen[loop]) + 1;
    choose(loop, Math.max(0, Math.min(among.length, now + step)));
    event.preventDefault();
    return true;
  });

  set(options.chosen || []);
  const watch = new MutationObserver((changes) => {  // a box was folded or unfolded
    if (changes.some(({ addedNodes }) => [...addedNodes].some((el) => ["face", "level"].some((name) => el.classList?.contains(name))))) apply();
  });
  watch.observe(svg, { childList: true, subtree: true });
  return { chooseIteration, follow, set, stop() { watch.disconnect(); } };
}
