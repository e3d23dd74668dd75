// Without this file everything is open. With it, a group of clauses opens at its heading; one that failed starts open.
const groups = [...document.querySelectorAll("tbody.group")].map((group) => {
  const clauses = group.nextElementSibling, heading = group.querySelector("th"), button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  button.setAttribute("aria-controls", clauses.id);
  heading.append(button);
  const open = (yes) => { clauses.hidden = !yes; button.setAttribute("aria-expanded", yes); };
  button.addEventListener("click", () => open(clauses.hidden));
  open(group.querySelector(".failed") !== null);
  return { clauses, open };
});

const all = document.getElementById("all");
all.parentElement.hidden = false;
all.addEventListener("click", () => {
  const yes = groups.some(({ clauses }) => clauses.hidden);
  groups.forEach(({ open }) => open(yes));
  all.textContent = yes ? "Hide all clauses" : "Show all clauses";
});

// A link to a clause opens its group.
const follow = () => {
  const target = document.getElementById(location.hash.slice(1));
  groups.filter(({ clauses }) => clauses.contains(target)).forEach(({ open }) => open(true));
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", follow);
follow();

// For browsers whose print styles cannot open <details>.
let opened = [];
addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((it) => { it.open = true; }); });
addEventListener("afterprint", () => { opened.forEach((it) => { it.open = false; }); });
