-- Follows the text of the scripts lease, parent, throttle, holds, heartbeat, members, layouts, renewal and versions,
-- which defines `run`. Handles corrupt stored values, so that these scripts need not check each value before they
-- use it, which would make every call slower. allow.lua, register.lua and look.lua check what
-- they read.
--
-- If the script fails because of a stored value, it is run once more, with `true` as its first argument. It
-- then treats the corrupt value as absent. What the first attempt wrote stays. So a script must do the
-- same when it runs again after a part of it: it checks before it writes, or writes absolute values.
-- If it fails again, the reply is an error. Errors that Redis returns for other reasons, such as OOM,
-- are passed on unchanged.

local function guarded(...)
  local done, reply = pcall(run, false, ...)
  if done then return reply end
  -- Errors of Redis begin with a code in capitals, those of Lua with a place in the script, and those
  -- that a script raises itself with neither.
  local coded = '^%u+ '
  if not string.find(reply, coded) or string.find(reply, '^WRONGTYPE ')
    or string.find(reply, '^ERR value is not ') then
    done, reply = pcall(run, true, ...)
    if done then return reply end
  end
  return { err = string.find(reply, coded) and reply or 'ERR ' .. reply }
end
