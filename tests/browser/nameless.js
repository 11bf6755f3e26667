// What can be reached or looked at, and has no name that a screen reader could say.
[...document.querySelectorAll("button, a[href], input, select, [tabindex='0'], canvas, [role=img]")]
  .filter((e) => e.checkVisibility() && !e.closest("[aria-hidden=true]"))
  .filter((e) => !e.getAttribute("aria-label") && !e.textContent?.trim() && !e.labels?.length)
  .map((e) => e.outerHTML.slice(0, 80));
