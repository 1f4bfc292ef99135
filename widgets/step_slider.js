// HTML that is renewed in place, and a slider over its earlier states by step. The page keeps the states, so that the
// slider answers while the kernel is busy with the very training that it shows.
//
// A message {kind: "state", number, step, html, kept} is the newest state, and kept the numbers of all states that stay.
// {kind: "states", states: [[number, step, html], ...]} answers {kind: "past"}, which a page asks for when it begins.
const tfnbStates = new WeakMap();  // model -> number -> {step, html}, the oldest first
function tfnbHear(model) {
  const states = new Map();
  tfnbStates.set(model, states);
  model.on("msg:custom", (message) => {
    if (message?.kind === "states") {
      const later = [...states];
      states.clear();
      for (const [number, step, html] of message.states) states.set(number, { step, html });
      for (const [number, state] of later) states.set(number, state);  // came while the answer was on its way
    } else if (message?.kind === "state") {
      const kept = new Set(message.kept);
      for (const number of [...states.keys()]) if (!kept.has(number)) states.delete(number);
      states.set(message.number, { step: message.step, html: message.html });
    } else return;
    model.tfnbRenew?.forEach((renew) => renew());
  });
  model.send({ kind: "past" });
}
function tfnbCard(html) {
  const found = new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
  return found && tfnbClean(found, "div span b details summary table tbody tr th td polyline polygon");
}
function render({ model, el }) {
  if (!tfnbStates.has(model)) tfnbHear(model);  // a host that does not call initialize
  const states = tfnbStates.get(model);
  let looked = null;  // the number of the state that stands still; null: now
  const style = el.appendChild(document.createElement("style"));  // hides the static output, however often that is renewed
  style.textContent = `[data-tfnb="${CSS.escape(model.get("twin"))}"] { display: none; }`;
  const place = el.appendChild(document.createElement("div"));
  const row = el.appendChild(document.createElement("div"));
  row.style.cssText = "display:flex;gap:.6em;align-items:center;max-width:60em;padding:.3em 0;flex-wrap:wrap";
  const slider = row.appendChild(document.createElement("input"));
  Object.assign(slider, { type: "range", min: 0, step: 1 });
  slider.setAttribute("aria-label", "step of the training that is shown");
  slider.style.flex = "1 1 12em";
  const words = row.appendChild(document.createElement("span"));
  words.setAttribute("aria-live", "off");
  const button = row.appendChild(document.createElement("button"));
  button.textContent = "now";

  const focusable = () => [...place.querySelectorAll("[tabindex], summary")];
  function put(html) {  // what had the focus has it again, and what was open stays open
    if (place.tfnbHtml === html) return;
    const focused = focusable().indexOf(el.ownerDocument.activeElement);
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    const card = tfnbCard(html);
    place.replaceChildren(...(card ? [card] : []));
    place.tfnbHtml = html;
    place.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? one.open; });
    if (focused >= 0) focusable()[focused]?.focus({ preventScroll: true });
  }
  function renew() {
    const numbers = [...states.keys()], last = numbers.length - 1;
    if (looked !== null && !states.has(looked)) looked = numbers.findLast((number) => number < looked) ?? numbers[0] ?? null;
    const at = looked === null ? last : numbers.indexOf(looked), state = states.get(numbers[at]);
    row.hidden = last < 1;
    row.style.display = last < 1 ? "none" : "flex";
    slider.max = Math.max(last, 0);
    slider.value = Math.max(at, 0);
    button.disabled = looked === null;
    const step = (state?.step ?? 0).toLocaleString("en");
    words.textContent = looked === null ? `step ${step}` : `step ${step} of ${states.get(numbers[last]).step.toLocaleString("en")}`;
    slider.setAttribute("aria-valuetext", words.textContent);
    put(state ? state.html : model.get("html"));
  }
  slider.addEventListener("input", () => {
    const numbers = [...states.keys()], at = Number(slider.value);
    looked = at >= numbers.length - 1 ? null : numbers[at];
    renew();
  });
  button.addEventListener("click", () => { looked = null; renew(); slider.focus(); });
  (model.tfnbRenew ||= new Set()).add(renew);
  renew();
  return () => { model.tfnbRenew.delete(renew); };
}
export default { initialize: ({ model }) => tfnbHear(model), render };
