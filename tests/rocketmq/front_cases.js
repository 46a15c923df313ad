// Uses a front with the official client for Node; each line of the output is a fact.

const client = require('rocketmq-client-nodejs');
const { TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const [endpoints, accessKey, accessSecret] = process.argv.slice(2);
// The front of credentials speaks TLS, too.
const secure = accessKey === undefined ? {} : { sslEnabled: true, sessionCredentials: { accessKey, accessSecret } };
const place = { endpoints, namespace: '', ...secure };
const MINUTE = 60000;

function say(...facts) {
  console.log(JSON.stringify(facts));
}

// Returns the words of an error, without the id of the request and the front's own words.
function words(error) {
  return String(error.message).replace(/request-id=[^,]*, |(?<=[a-z.]) \[.*/g, '');
}

async function refused(call) {
  try {
    await call();
  } catch (refusal) {
    say('refused', words(refusal));
  }
}

async function send(producer) {
  for (const body of ['first', 'second']) {
    const message = { topic: 'steps', body: Buffer.from(body), messageGroup: 'group', tag: 'tag', keys: ['k1', 'k2'] };
    const receipt = await producer.send({ ...message, properties: new Map([['name', 'value']]) });
    say('sent', body, receipt.messageId.slice(0, 2));
  }
  for (const tag of ['a', 'b', 'c']) {
    await producer.send({ topic: 'orders', body: Buffer.from(tag), tag });
  }
}

// Ends a transaction twice, rolls one back, and leaves two to the checker.
async function transact(producer) {
  for (const body of ['committed', 'rolled back', 'forgotten', 'undone']) {
    const transaction = producer.beginTransaction();
    await producer.send({ topic: 'paid', body: Buffer.from(body) }, transaction);
    if (body === 'committed') {
      await transaction.commit();
      await transaction.commit();
      await refused(() => transaction.rollback());
    } else if (body === 'rolled back') {
      await transaction.rollback();
    }
  }
}

function consumer(consumerGroup, topic, expression) {
  const subscriptions = new Map([[topic, expression]]);
  return new client.SimpleConsumer({ ...place, consumerGroup, subscriptions, awaitDuration: 5000 });
}

// Receives and acknowledges until so many bodies have come; the first one is given back once.
async function receive(group, topic, expression, number) {
  const receiver = consumer(group, topic, expression);
  await receiver.startup();
  const found = [];
  let givesBack = true;
  while (found.length < number) {
    for (const message of await receiver.receive(32, MINUTE)) {
      if (givesBack) {
        givesBack = false;
        await receiver.changeInvisibleDuration(message, 0);
      } else {
        found.push([message.body.toString(), message.deliveryAttempt]);
        await receiver.ack(message);
      }
    }
  }
  say('received', topic, found.sort());
  await receiver.shutdown();
}

// Receives with a push consumer, whose listener fails once.
async function push(consumerGroup, times) {
  const found = [];
  let done;
  const all = new Promise((resolve) => { done = resolve; });
  const messageListener = {
    async consume({ body, deliveryAttempt, tag, keys, messageGroup, properties }) {
      found.push([body.toString(), deliveryAttempt, tag, keys, messageGroup, properties.get('name')]);
      if (found.length === times) {
        done();
      }
      const fails = body.toString() === 'second' && deliveryAttempt === 1;
      return fails ? client.ConsumeResult.FAILURE : client.ConsumeResult.SUCCESS;
    },
  };
  const subscriptions = new Map([['steps', '*']]);
  const receiver = new client.PushConsumer({ ...place, consumerGroup, subscriptions, messageListener });
  await receiver.startup();
  await all;
  // The answer about the last message follows the listener.
  await new Promise((resolve) => { setTimeout(resolve, 1000); });
  await receiver.shutdown();
  return found.sort();
}

async function main() {
  const checker = {
    async check(message) {
      return message.body.toString() === 'undone' ? TransactionResolution.ROLLBACK : TransactionResolution.COMMIT;
    },
  };
  // With several topics the client may miss the first answer to its settings, and then waits for minutes.
  const producer = new client.Producer({ ...place, topics: ['paid'], checker });
  await producer.startup();
  await send(producer);
  await transact(producer);
  await receive('accounts', 'paid', '*', 2);
  await receive('readers', 'orders', 'a || c', 2);
  // A push consumer ends with its long poll. Both have the same messages, and one takes them in order.
  const pushed = await Promise.all([push('packing', 3), push('billing', 2)]);
  say('pushed', ...pushed);
  await producer.shutdown();
}

main().then(() => process.exit(0), (error) => {
  // The reason is at the bottom of a failed start.
  say('failed', words(error.cause?.cause ?? error));
  process.exit(1);
});
