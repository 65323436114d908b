// What a page does beyond HTML: select all letters that it lists, count the selected ones. It works without this, too.
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

// The name of another queue chooses that target.
const to = document.querySelector("input[name=to]");
if (to) to.addEventListener("input", () => {
  document.querySelector(`input[name=target][value=${to.value ? "queue" : "origin"}]`).checked = true;
});
