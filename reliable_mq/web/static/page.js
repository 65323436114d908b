// Optional additions to the HTML of a page: select all listed letters, count the selected ones, send each form only
// once, and show when the server does not answer. The page also works without this script.
"use strict";

const form = document.getElementById("chosen");
if (form) {
  const boxes = [...form.querySelectorAll("input[name=letter]")];
  const all = document.getElementById("all-here");
  const told = document.getElementById("selected");
  const count = () => {
    const selected = boxes.filter((box) => box.checked).length;
    all.checked = selected === boxes.length;
    all.indeterminate = selected > 0 && selected < boxes.length;
    told.textContent = selected ? `${selected} selected` : "";
    for (const button of form.querySelectorAll("button[value=selected]")) button.disabled = !selected;
  };
  all.hidden = false;
  all.addEventListener("change", () => {
    for (const box of boxes) box.checked = all.checked;
    count();
  });
  form.addEventListener("change", count);
  window.addEventListener("pageshow", count); // a browser that goes back restores the boxes
  count();
}

// Typing the name of another queue selects that target.
const to = document.querySelector("input[name=to]");
if (to) to.addEventListener("input", () => {
  document.querySelector(`input[name=target][value=${to.value ? "queue" : "origin"}]`).checked = true;
});

// Ignore a second press on a button within 5 seconds: it would replay as many letters again.
document.addEventListener("submit", (event) => {
  const sent = event.target;
  if (sent.method !== "post") return;
  if (sent.dataset.sent) event.preventDefault();
  sent.dataset.sent = "yes";
  setTimeout(() => delete sent.dataset.sent, 5000);
});

// A part that refreshes itself retries while the server does not answer. A client error reloads the page to show it.
const silent = document.getElementById("silent");
const again = (event) => {
  silent.hidden = false;
  setTimeout(() => htmx.trigger(event.detail.elt, "again"), 2000);
};
document.body.addEventListener("htmx:sendError", again);
document.body.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status < 500) location.reload();
  else again(event);
});
document.body.addEventListener("htmx:afterOnLoad", (event) => { if (event.detail.successful) silent.hidden = true; });
