// Markup from our own strings, reduced to what drawings and timelines are made of. Gives one element, or null.
function tfnbClean(el, words = "") {
  const ALLOWED = new Set(`svg g rect path circle text title style ${words}`.split(" "));
  const clean = (one) => {
    if (!ALLOWED.has(one.localName)) return one.remove();
    for (const { name } of [...one.attributes]) if (/^on|href/i.test(name)) one.removeAttribute(name);
    [...one.children].forEach(clean);
  };
  clean(el);
  return ALLOWED.has(el.localName) ? document.importNode(el, true) : null;
}
async function tfnbUnpacked(script) {  // what `packed` of Python wrote; nothing in a browser from before 2023
  if (!script || !window.DecompressionStream) return {};
  const bytes = Uint8Array.from(atob(script.textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
function tfnbParse(text) {  // a picture
  const page = new DOMParser().parseFromString(text, "image/svg+xml");
  return page.querySelector("parsererror") ? null : tfnbClean(page.documentElement);
}
function tfnbBelow(text) {  // what stands below a picture: another one, and tables
  const found = new DOMParser().parseFromString(text, "text/html").body.firstElementChild;
  return found && tfnbClean(found, "div span b details summary table tbody tr th td");
}
