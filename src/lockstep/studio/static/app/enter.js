// The page that asks for the token: from the address, whose fragment no server and no other site sees, or from the field.

const form = document.querySelector("form");
const alert = document.querySelector("[role=alert]");
const given = /^#token=([\w-]+)$/.exec(location.hash)?.[1];
if (given) history.replaceState(null, "", location.pathname);

async function enter(token) {
  const answer = await fetch("api/session", { method: "POST", body: JSON.stringify({ token }) });
  // Loaded again by this page, so that the browser sends a SameSite=Strict cookie.
  if (answer.ok) return location.reload();
  alert.textContent = (await answer.json()).message;
  alert.hidden = false;
  document.querySelector("main").hidden = false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  enter(form.token.value.trim());
});
// A link elsewhere leads here without the cookie, which this page's requests have.
if (given) await enter(given);
else if ((await (await fetch("api/session")).json()).data) location.reload();
else document.querySelector("main").hidden = false;
