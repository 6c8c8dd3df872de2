// The page that exchanges the token for a session: from the address, whose fragment is sent to no server, or from the field.

const form = document.querySelector("form");
const alert = document.querySelector("[role=alert]");
const given = /^#token=([\w-]+)$/.exec(location.hash)?.[1];
if (given) history.replaceState(null, "", location.pathname);

async function enter(token) {
  const answer = await fetch("api/session", { method: "POST", body: JSON.stringify({ token }) });
  // Reload from this page: the browser then sends the SameSite=Strict cookie.
  if (answer.ok) return location.reload();
  alert.textContent = (await answer.json()).message;
  alert.hidden = false;
  document.querySelector("main").hidden = false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  enter(form.token.value.trim());
});
// A link on another site leads here without the cookie; requests of this page send it.
if (given) await enter(given);
else if ((await (await fetch("api/session")).json()).data) location.reload();
else document.querySelector("main").hidden = false;
