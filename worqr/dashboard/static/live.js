// Live numbers and graphs, times in the zone of the browser, and "choose all". Pages work without this file: a reload looks again.
"use strict";
(() => {
  const zone = Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
  const clock = Intl.DateTimeFormat("sv-SE", { timeStyle: "medium" });

  const hour = Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
  const weekday = Intl.DateTimeFormat("en-GB", { weekday: "short" });

  function localize(part) {
    const today = new Date().toDateString();
    for (const time of part.querySelectorAll("time[datetime]")) {
      const when = new Date(time.dateTime);
      time.title = `${time.textContent} UTC`;
      time.textContent = (when.toDateString() === today ? clock : zone).format(when);
    }
    for (const name of part.querySelectorAll(".zone")) name.remove();
    for (const text of part.querySelectorAll("text[data-at]")) {
      const when = new Date(text.dataset.at);
      text.textContent = (text.textContent.includes(" ") ? `${weekday.format(when)} ` : "") + hour.format(when);
    }
  }

  // Shows the values of all charts at the time under the pointer. They are taken from the table below the charts.
  function followPointer(charts) {
    const rows = [...document.querySelectorAll("#values tbody tr")].reverse();
    const values = [...charts.querySelectorAll(".value")];
    const latest = values.map((value) => value.textContent);
    const lines = charts.querySelectorAll(".cross");
    const title = document.getElementById("history-at");
    const last = title.textContent;

    function show(place) {
      const row = rows[place];
      values.forEach((value, index) => {
        value.textContent = row ? row.cells[Number(value.dataset.column) + 1].textContent : latest[index];
      });
      for (const line of lines) {
        const x = `${((place + 0.5) / rows.length) * 100}%`;
        if (row) { line.setAttribute("x1", x); line.setAttribute("x2", x); }
        line.setAttribute("visibility", row ? "visible" : "hidden");
      }
      title.textContent = row ? row.cells[0].textContent : last;
    }

    charts.addEventListener("pointermove", (event) => {
      const plot = event.target.closest(".chart")?.querySelector(".plot > svg");
      const box = plot?.getBoundingClientRect();
      if (box?.width) show(Math.max(0, Math.min(rows.length - 1, Math.floor(((event.clientX - box.left) / box.width) * rows.length))));
    });
    charts.addEventListener("pointerleave", () => show(-1));
  }

  localize(document);
  document.querySelectorAll("[data-charts]").forEach(followPointer);
  offerCopies(document);

  function offerCopies(part) {
    for (const button of navigator.clipboard ? part.querySelectorAll("button.copy") : []) {
      button.hidden = false;
      button.addEventListener("click", () => {
        navigator.clipboard.writeText(button.previousElementSibling.value).then(() => { button.textContent = "Copied"; });
      });
    }
  }

  const list = document.querySelector(".side ul");
  const current = document.querySelector(".side [aria-current]");
  const right = current ? current.offsetLeft + current.offsetWidth + 16 - list.parentElement.clientWidth : 0;
  if (right > 0) list.parentElement.scrollLeft = right; // the narrow navigation scrolls

  const all = document.querySelector("input[data-all]");
  if (all) {
    all.hidden = false;
    all.addEventListener("change", () => {
      for (const box of document.querySelectorAll("tbody .box input")) box.checked = all.checked;
    });
  }

  const address = document.body.dataset.live;
  const status = document.getElementById("live");
  if (!address || !status || !window.EventSource) return;
  const banner = document.getElementById("down");
  const pill = document.getElementById("moved");
  const places = new Map();

  function findPlaces() {
    places.clear();
    for (const place of document.querySelectorAll("[data-k]")) {
      places.set(place.dataset.k, [...(places.get(place.dataset.k) || []), place]);
    }
  }

  findPlaces();
  let stream = null;
  let shown = clock.format(new Date());

  function say(text) {
    status.textContent = text;
  }

  function seen() {
    shown = clock.format(new Date());
    say(`Live · ${shown}`);
  }

  function set(event) {
    for (const [key, text] of Object.entries(JSON.parse(event.data))) {
      for (const place of places.get(key) || []) {
        if (place.tagName === "PROGRESS") {
          place.value = Number(text);
          place.classList.toggle("unknown", !text);
        } else if (place.textContent !== text) {
          place.textContent = text;
          place.classList.toggle("zero", text === "0" || text === "–");
          if (place.parentElement.matches(".line-note")) place.parentElement.hidden = !text;
        }
      }
    }
    if (banner.hidden) seen();
    else back(); // a stream that begins after the server came back does not say so
  }

  // Replaces the graphs, unless the pointer or the focus is in them: the next ones come soon.
  function redraw(event) {
    const old = document.querySelector("section.history");
    if (!old || old.matches(":hover") || old.contains(document.activeElement)) return;
    const made = new DOMParser().parseFromString(JSON.parse(event.data).html, "text/html").querySelector("section.history");
    const [before, after] = [old.querySelector("details"), made.querySelector("details")];
    if (before && after) after.open = before.open;
    localize(made);
    old.replaceWith(made);
    made.querySelectorAll("[data-charts]").forEach(followPointer);
  }

  // Replaces the whole page, unless somebody uses it: then a button offers it.
  function replace(event) {
    const { html, text } = JSON.parse(event.data);
    const main = document.getElementById("main");
    document.getElementById("news").textContent = text;
    const used = main.contains(document.activeElement) || main.querySelector("details[open]") || !getSelection().isCollapsed;
    pill.firstElementChild.textContent = `${text} Show it`;
    pill.hidden = !used;
    if (used) return;
    const made = new DOMParser().parseFromString(html, "text/html").body;
    localize(made);
    main.replaceChildren(...made.childNodes);
    offerCopies(main);
    findPlaces();
    seen();
  }

  function away(why) {
    document.body.classList.add("away");
    banner.textContent = `${why} The figures are of ${shown}.`;
    banner.hidden = false;
    for (const button of document.querySelectorAll("form[method=post] button")) button.disabled = true;
    say(`Not live · ${shown}`);
  }

  function back() {
    document.body.classList.remove("away");
    banner.hidden = true;
    for (const button of document.querySelectorAll("form[method=post] button")) button.disabled = false;
    seen();
  }

  function open() {
    if (stream || document.hidden) return;
    stream = new EventSource(address);
    stream.addEventListener("open", () => { if (banner.hidden) seen(); });
    stream.addEventListener("set", set);
    stream.addEventListener("graphs", redraw);
    stream.addEventListener("page", replace);
    stream.addEventListener("moved", () => { pill.hidden = false; });
    stream.addEventListener("down", () => away("The server does not answer."));
    stream.addEventListener("up", back);
    stream.addEventListener("error", () => {
      if (stream && stream.readyState === EventSource.CLOSED) say(`Not live · ${shown}: reload to look again`);
      else say(`Connecting · ${shown}`);
    });
  }

  function close() {
    if (stream) stream.close();
    stream = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
