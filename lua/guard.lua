-- What stands behind every script, so that none ever raises: the script is the body of `run`, and
-- this follows it.
--
-- Where a script meets something stored that it can't work with, it fails, and is run once more
-- with `true` for its `...`: then it goes on as if that were absent. To look at everything before
-- it is used would cost all decisions what only this one costs now. A script that has no use for
-- such arguments as it got fails again, and the reply is an error; as it is for all that Redis
-- says no to for other reasons: those words are passed on as they are.

local done, reply = pcall(run)
if done then return reply end

-- Redis' own words begin with a code in capitals, Lua's with a place, a script's with neither.
local function coded(failure)
  return string.find(failure, '^%u+ ')
end
if not coded(reply) or string.find(reply, '^WRONGTYPE ')
  or string.find(reply, '^ERR value is not ') then
  done, reply = pcall(run, true)
  if done then return reply end
end
return { err = coded(reply) and reply or 'ERR ' .. reply }
